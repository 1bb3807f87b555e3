#include "fedshard/cost/machine.h"

#include <fmt/ranges.h>

#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::cost {
namespace {

using base::fail;
using base::UsageError;

constexpr double kAny = 1e30;
constexpr std::array<const char*, 4> kLabels = {"measured", "published", "derived", "assumed"};

// In the order of Key.
constexpr std::array<KeyText, kKeys> kTexts = {{
    {"peak_flops", "FLOP/s", "of a rank's processor in the compute dtype", 1, kAny},
    {"efficiency", "", "of that peak, what large products reach", 1e-6, 1},
    {"memory_bytes", "B", "of a rank", 1, kAny},
    {"memory_bandwidth", "B/s", "with which an update reads and writes a rank's memory", 1, kAny},
    {"update_bytes", "B", "that an update reads and writes of an element of the shard", 0, 1e6},
    {"step_overhead", "s", "of a step that nothing hides", 0, kAny},
    {"node_bandwidth", "B/s", "of a ring inside a node", 1, kAny},
    {"node_latency", "s", "of a message inside a node", 0, kAny},
    {"network_bandwidth", "B/s", "of a rank out of its node", 1, kAny},
    {"network_latency", "s", "of a message between nodes", 0, kAny},
    {"network_efficiency", "", "of the network's bandwidth, what two nodes reach", 1e-6, 1},
    {"congestion", "", "of the network's bandwidth, what is lost on many nodes", 0, 0.999},
    {"congestion_doublings", "", "of nodes, after which that much is lost", 1e-3, kAny},
    {"cell_bandwidth", "B/s", "between two cells, all their ranks together", 1, kAny},
    {"cell_latency", "s", "of a message between cells", 0, kAny},
    {"collective_base", "s", "of every collective", 0, kAny},
    {"jitter", "s", "mean lateness of a rank at a collective", 0, kAny},
    {"spread", "", "mean lateness of a rank in a computation, of its time", 0, 1e3},
    {"call", "s", "for which the host is busy with a collective", 0, kAny},
    {"call_per_rank", "s", "likewise, for each further rank of it", 0, kAny},
}};

}  // namespace

const char* name_of(Label label) { return kLabels[static_cast<std::size_t>(label)]; }

Label label_of(std::string_view name) {
  for (std::size_t i = 0; i < kLabels.size(); ++i) {
    if (name == kLabels[i]) return static_cast<Label>(i);
  }
  fail<UsageError>("a label is one of {}, not '{}'", fmt::join(kLabels, ", "), name);
}

const KeyText& text_of(Key key) { return kTexts[static_cast<std::size_t>(key)]; }

Key key_of(std::string_view name) {
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < kTexts.size(); ++i) {
    if (name == kTexts[i].name) return static_cast<Key>(i);
    names.emplace_back(kTexts[i].name);
  }
  fail<UsageError>("a machine has no constant '{}'; it has {}", name, fmt::join(names, ", "));
}

void check(Key key, double value) {
  const KeyText& text = text_of(key);
  if (!(value >= text.at_least && value <= text.at_most)) {
    fail<UsageError>("{} is {}, not {}", text.name,
                     text.at_most < kAny ? fmt::format("from {:g} to {:g}", text.at_least, text.at_most)
                                         : fmt::format("at least {:g}", text.at_least),
                     value);
  }
}

}  // namespace fedshard::cost
