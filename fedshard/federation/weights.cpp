#include "fedshard/federation/weights.h"

#include <numeric>

#include "fedshard/base/error.h"

namespace fedshard::federation {

std::vector<double> weights_of(WeightPolicy policy, std::span<const std::int64_t> tokens) {
  if (policy == WeightPolicy::uniform)
    return std::vector<double>(tokens.size(), 1.0 / static_cast<double>(tokens.size()));
  const std::int64_t total = std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0});
  if (total <= 0) {
    base::fail<base::RunError>("no group has trained on any token since the last round; there is nothing to weigh by");
  }
  std::vector<double> weights;
  for (const std::int64_t t : tokens) weights.push_back(static_cast<double>(t) / static_cast<double>(total));
  return weights;
}

}  // namespace fedshard::federation
