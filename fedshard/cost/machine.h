// A machine as the time model knows it: how many ranks a node and a cell have, and constants, each of which says what
// it rests on. Read from a machine file by config/machine_file.h.
//
// A surprise: constants are a table and not members, so that each can be printed with its source, replaced by a
// profile, varied for a sensitivity and fitted to measured runs without being named a second time.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "fedshard/cost/tally.h"

namespace fedshard::cost {

enum class Label { measured, published, derived, assumed };
const char* name_of(Label label);
Label label_of(std::string_view name);  // throws UsageError

enum class Key {
  peak_flops,            // of a rank's processor, a second, in the compute dtype
  efficiency,            // of that, what large products reach
  memory_bytes,          // of a rank
  memory_bandwidth,      // bytes a second, that an optimizer's update reads and writes
  update_bytes,          // that it touches, of an element of the shard
  step_overhead,         // seconds of every step that nothing hides: data, logs, launches
  node_bandwidth,        // bytes a second that a ring inside a node moves ("bus bandwidth")
  node_latency,          // seconds of a message there
  network_bandwidth,     // bytes a second and rank, out of a node
  network_latency,       // seconds of a message between nodes
  network_efficiency,    // of that bandwidth, on two nodes
  congestion,            // what is lost of it at most, on many nodes
  congestion_doublings,  // of nodes, after which that much is lost
  cell_bandwidth,        // bytes a second between two cells, all ranks together
  cell_latency,          // seconds of a message between cells
  collective_base,       // seconds of any collective
  jitter,                // seconds, mean lateness of a rank at a collective
  spread,                // of a computation's time, mean lateness of a rank
  call,                  // seconds for which the host issues a collective
  call_per_rank,         // likewise, for each further rank
};
inline constexpr int kKeys = static_cast<int>(Key::call_per_rank) + 1;

struct KeyText {
  const char* name;
  const char* unit;
  const char* doc;
  double at_least, at_most;
};
const KeyText& text_of(Key key);
Key key_of(std::string_view name);  // throws UsageError that lists the names

struct Constant {
  double value = 0;
  Label label = Label::assumed;
  std::string source;
};

// How a program drives the machine: what a profile may set beside constants.
struct Software {
  // Gathers ahead of their use, whatever the config says; 0 serialises a backward's gather, computation and reduction.
  std::optional<int> prefetch;
  bool root_unit = false;      // embedding, last norm and head are one unit, as FSDP1 wraps them; else two, as we do
  bool host_computes = false;  // the host waits for each computation (a CPU)
  bool lockstep = false;       // rings go round by round, as our own do; else as NCCL's, whose latencies add up
};

struct Machine {
  std::string name;
  Placement placement = {};
  Software software = {};
  std::array<Constant, kKeys> constants = {};
  double operator[](Key key) const { return constants[static_cast<std::size_t>(key)].value; }
  Constant& at(Key key) { return constants[static_cast<std::size_t>(key)]; }
  const Constant& at(Key key) const { return constants[static_cast<std::size_t>(key)]; }
};

// Throws UsageError unless the value is in the key's range.
void check(Key key, double value);

}  // namespace fedshard::cost
