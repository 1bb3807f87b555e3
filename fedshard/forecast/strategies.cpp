#include "fedshard/forecast/strategies.h"

#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/base/parse.h"

namespace fedshard::forecast {

using base::fail;
using base::UsageError;

Strategy parse_strategy(const std::string& text) {
  std::vector<std::string> parts = {""};
  for (const char c : text) {
    if (c == ':') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  std::vector<int> numbers;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const int number = base::parse_number<int>(parts[i]).value_or(0);
    if (number < 1) fail<UsageError>("--strategies {}: '{}' is no number of ranks", text, parts[i]);
    numbers.push_back(number);
  }
  if (parts[0] == "fsdp" && numbers.empty()) return {text};
  if (parts[0] == "hsdp" && numbers.size() == 1) return {text, 0, numbers[0]};
  if (parts[0] == "fl+fsdp" && numbers.size() == 1) return {text, numbers[0]};
  if (parts[0] == "fl+hsdp" && numbers.size() == 2) return {text, numbers[0], numbers[1]};
  fail<UsageError>(
      "--strategies {}: it is fsdp, hsdp:SHARDS, fl+fsdp:GROUP or fl+hsdp:GROUP:SHARDS, in ranks of a group", text);
}

config::Config with_strategy(config::Config config, const Strategy& strategy, int ranks) {
  const int group = strategy.group > 0 ? strategy.group : ranks;
  if (ranks % group != 0) {
    fail<UsageError>("{}: {} ranks are no whole number of groups of {}", strategy.name, ranks, group);
  }
  const int shards = strategy.shards > 0 ? strategy.shards : group;
  if (group % shards != 0) {
    fail<UsageError>("{}: a group of {} ranks is no whole number of replicas of {} shards", strategy.name, group,
                     shards);
  }
  config.parallelism.groups = ranks / group;
  config.parallelism.data_parallel_shard_degree = shards;
  config.parallelism.data_parallel_replicate_degree = group / shards;
  return config;
}

}  // namespace fedshard::forecast
