#include "fedshard/config/machine_file.h"

#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"
#include "fedshard/base/parse.h"
#include "fedshard/config/values.h"

namespace fedshard::config {
namespace {

using base::fail;
using base::UsageError;
using cost::Key;

constexpr double kUnlimited = 1e30;

class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  MachineFile read(std::string_view text) {
    const toml::table root = parse_toml(text, file_);
    MachineFile result;
    cost::Machine& machine = result.machine;
    allow_only(root, {"name", "ranks_per_node", "nodes_per_cell", "software", "constants", "profiles"}, "");
    read_shape(root, machine);
    if (const toml::table* software = table_of(root, "software")) {
      allow_only(*software, {"prefetch", "root_unit", "host_computes", "lockstep"}, "[software]");
      for (const auto& [key, node] : *software) read_software(key.str(), node, machine.software);
    }
    const toml::table* constants = table_of(root, "constants");
    if (constants == nullptr) fail<UsageError>("{}: a machine has a table [constants]", file_);
    for (const auto& [key, node] : *constants) read_constant(key.str(), node, machine, "");
    complete(machine);
    if (const toml::table* profiles = table_of(root, "profiles")) read_profiles(*profiles, result);
    return result;
  }

 private:
  std::string where(const toml::node& node) const { return fmt::format("{}:{}", file_, node.source().begin.line); }

  // What it gives, or its refusal with the line in front.
  template <class Function>
  auto checked(const toml::node& node, const Function& function) const {
    try {
      return function();
    } catch (const UsageError& e) {
      fail<UsageError>("{}: {}", where(node), e.what());
    }
  }

  void allow_only(const toml::table& table, const std::vector<std::string_view>& names, const std::string& of) const {
    for (const auto& [key, node] : table) {
      if (std::find(names.begin(), names.end(), key.str()) != names.end()) continue;
      fail<UsageError>("{}: {} has no key '{}'; it has {}", where(node), of.empty() ? "a machine file" : of, key.str(),
                       fmt::join(names, ", "));
    }
  }

  const toml::table* table_of(const toml::table& root, std::string_view name) const {
    const toml::node* node = root.get(name);
    if (node != nullptr && !node->is_table()) fail<UsageError>("{}: '{}' is a table", where(*node), name);
    return node == nullptr ? nullptr : node->as_table();
  }

  void read_shape(const toml::table& root, cost::Machine& machine) const {
    const toml::node* name = root.get("name");
    if (name == nullptr) fail<UsageError>("{}: name is missing: which machine is it?", file_);
    read_value(*name, {where(*name), "name"}, {.not_empty = true}, machine.name);
    for (const auto& [key, number] : {std::pair<const char*, int*>{"ranks_per_node", &machine.placement.ranks_per_node},
                                      {"nodes_per_cell", &machine.placement.nodes_per_cell}}) {
      const toml::node* node = root.get(key);
      if (node != nullptr) read_value(*node, {where(*node), key}, at_least(1), *number);
    }
    if (machine.placement.nodes_per_cell > 0 && machine.placement.ranks_per_node == 0) {
      fail<UsageError>("{}: nodes_per_cell is set, but ranks_per_node is missing", file_);
    }
  }

  // Whether it is one of the software's keys.
  bool read_software(std::string_view key, const toml::node& node, cost::Software& software) const {
    const auto read = [&](const Range& range, auto& value) {
      read_value(node, {where(node), std::string(key)}, range, value);
      return true;
    };
    if (key == "prefetch") return read(between(0, 64), software.prefetch);
    if (key == "root_unit") return read({}, software.root_unit);
    if (key == "host_computes") return read({}, software.host_computes);
    if (key == "lockstep") return read({}, software.lockstep);
    return false;
  }

  // `profile`: whose a bare number is; a machine's own constants say where they are from.
  void read_constant(std::string_view name, const toml::node& node, cost::Machine& machine,
                     const std::string& profile) {
    const Key key = checked(node, [&] { return cost::key_of(name); });
    const std::string text(name);
    cost::Constant constant{0, cost::Label::assumed, profile.empty() ? "" : "profile " + profile};
    if (const toml::table* table = node.as_table()) {
      allow_only(*table, {"value", "label", "source"}, text);
      for (const char* part : {"value", "label", "source"}) {
        if (!table->contains(part)) fail<UsageError>("{}: {} lacks '{}'", where(node), text, part);
      }
      std::string label;
      read_value(*table->get("value"), {where(node), text + ".value"}, {}, constant.value);
      read_value(*table->get("label"), {where(node), text + ".label"}, {}, label);
      read_value(*table->get("source"), {where(node), text + ".source"}, {.not_empty = true}, constant.source);
      constant.label = checked(node, [&] { return cost::label_of(label); });
    } else if (profile.empty()) {
      fail<UsageError>("{}: {} is a table: {{ value = ..., label = \"measured\", source = \"...\" }}", where(node),
                       text);
    } else {
      read_value(node, {where(node), text}, {}, constant.value);
    }
    checked(node, [&] { cost::check(key, constant.value); });
    machine.at(key) = constant;
    given_.insert(key);
  }

  // What a file may leave out, because nothing on such a machine is made of it, or because it is nothing.
  void complete(cost::Machine& machine) const {
    std::vector<const char*> missing;
    for (int k = 0; k < cost::kKeys; ++k) {
      const Key key = static_cast<Key>(k);
      const cost::KeyText& text = cost::text_of(key);
      if (given_.contains(key)) continue;
      const bool of_cells = key == Key::cell_bandwidth, of_network = key == Key::network_bandwidth;
      if (of_cells ? machine.placement.nodes_per_cell == 0 : of_network && machine.placement.ranks_per_node == 0) {
        machine.at(key).value = kUnlimited;
      } else if (key == Key::network_efficiency || key == Key::congestion_doublings) {
        machine.at(key).value = 1;
      } else if (text.at_least > 0) {
        missing.push_back(text.name);
      }
      if (machine.at(key).source.empty()) machine.at(key).source = "not given";
    }
    if (!missing.empty()) fail<UsageError>("{}: [constants] lacks {}", file_, fmt::join(missing, ", "));
  }

  void read_profiles(const toml::table& profiles, MachineFile& result) {
    std::vector<std::pair<toml::source_index, std::string>> by_line;
    for (const auto& [name, node] : profiles) {
      const std::string profile(name.str());
      if (!node.is_table()) fail<UsageError>("{}: write [profiles.{}]", where(node), profile);
      by_line.emplace_back(node.source().begin.line, profile);
      cost::Machine machine = result.machine;
      for (const auto& [key, value] : *node.as_table()) {
        const std::string_view of = key.str();
        if (of == "doc") {  // for who reads the file
          std::string doc;
          read_value(value, {where(value), "doc"}, {}, doc);
        } else if (!read_software(of, value, machine.software)) {
          read_constant(of, value, machine, profile);
        }
      }
      result.applied.emplace(profile, machine);
    }
    std::sort(by_line.begin(), by_line.end());
    for (const auto& [line, profile] : by_line) result.profiles.push_back(profile);
  }

  std::string file_;
  std::set<Key> given_;
};

}  // namespace

const cost::Machine& MachineFile::with(const std::string& profile) const {
  if (profile.empty()) return machine;
  const auto found = applied.find(profile);
  if (found == applied.end()) {
    fail<UsageError>("{} has no profile '{}'; {}", machine.name, profile,
                     profiles.empty() ? "it has none" : fmt::format("it has {}", fmt::join(profiles, ", ")));
  }
  return found->second;
}

std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (const auto& [name, text] : builtin_machines()) names.push_back(name);
  return names;
}

MachineFile load_machine(const std::string& name) {
  const auto builtin = builtin_machines().find(name);
  if (builtin != builtin_machines().end()) return Reader(name).read(builtin->second);
  if (!std::filesystem::is_regular_file(name)) {
    fail<UsageError>("--machine {}: there is no such file, and the known machines are {}", name,
                     fmt::join(machine_names(), ", "));
  }
  return Reader(name).read(base::read_file(name));
}

void override_constants(cost::Machine& machine, const std::vector<std::string>& settings) {
  for (const std::string& setting : settings) {
    const auto equals = setting.find('=');
    if (equals == std::string::npos) fail<UsageError>("--constant {}: write name=value", setting);
    const Key key = cost::key_of(setting.substr(0, equals));
    const std::string text = setting.substr(equals + 1);
    const auto value = base::parse_number<double>(text);
    if (!value) fail<UsageError>("--constant {}: '{}' is no number", setting, text);
    cost::check(key, *value);
    machine.at(key) = {*value, cost::Label::assumed, "--constant"};
  }
}

}  // namespace fedshard::config
