// What `fedshard cost` and `fedshard simulate` are asked about: a config file, or a model and a layout in flags.
// A surprise: the flags are short forms of `--set`, so that whatever a config may hold is read and checked in one
// place, and a question asked with flags alone has the defaults of a run.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fedshard/config/config.h"

namespace fedshard::forecast {

struct Question {
  std::string config;                 // a config file; empty: the flags say all
  std::vector<std::string> settings;  // overrides "table.key=value"
  std::string model;                  // a preset, or a config.json, or a folder that has one
  // As the keys of a config have them; lists as "4,2,2".
  std::optional<std::string> groups, shard, every, scheme, compress, accum, batch, seq;
  std::optional<std::string> bytes_gather, bytes_reduce, bytes_aggregate;  // of an element: 2 or 4
  std::optional<bool> reshard, reduce_each_micro_step;
};

// The config that is asked about. Throws UsageError as load_config does, and for a model that is none.
config::Config config_of(const Question& question);

// The ranks that were given, else the sum of the listed groups. Throws UsageError where neither says how many.
int world_of(const config::Config& config, std::optional<int> ranks);

}  // namespace fedshard::forecast
