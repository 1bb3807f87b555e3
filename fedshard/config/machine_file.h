// Machine files: a machine's shape and constants, each with its source, and profiles that change some of them. TOML,
// as examples/machines/ has them; those files are in the program too, under their names.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fedshard/cost/machine.h"

namespace fedshard::config {

// The files of examples/machines by name ("leonardo"); made by cmake/Machines.cmake.
const std::map<std::string, std::string_view>& builtin_machines();

std::vector<std::string> machine_names();  // theirs

struct MachineFile {
  cost::Machine machine;                         // without a profile
  std::vector<std::string> profiles;             // in the file's order
  std::map<std::string, cost::Machine> applied;  // the machine with each profile
  // "" is the machine itself. Throws UsageError that lists the profiles.
  const cost::Machine& with(const std::string& profile) const;
};

// `name`: a file, or the name of a builtin machine. Throws UsageError that names the file and line for what is no
// machine: a key or constant that does not exist, a value out of range, a constant without label or source, one that
// is missing. Where a machine has one node, nothing between nodes is asked for; where it has one cell, none between
// cells.
MachineFile load_machine(const std::string& name);

// Replaces constants: "network_bandwidth=6.25e9". Throws UsageError for what is no such setting, or out of range.
void override_constants(cost::Machine& machine, const std::vector<std::string>& settings);

}  // namespace fedshard::config
