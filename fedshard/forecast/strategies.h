// The four ways to train that the analysis compares, as words that fit any number of ranks: "fsdp", "hsdp:4" (shards),
// "fl+fsdp:8" (ranks of a group), "fl+hsdp:32:4" (ranks of a group, shards).
#pragma once
#include <string>

#include "fedshard/config/config.h"

namespace fedshard::forecast {

struct Strategy {
  std::string name;  // as it was written
  int group = 0;     // ranks of a federation group; 0: all
  int shards = 0;    // of a group; 0: as many as it has ranks
};

// Throws UsageError for what is none.
Strategy parse_strategy(const std::string& text);

// The config with the strategy's groups and shards for so many ranks. Throws UsageError where they do not divide.
config::Config with_strategy(config::Config config, const Strategy& strategy, int ranks);

}  // namespace fedshard::forecast
