#include "fedshard/federation/weights.h"

#include <numeric>

namespace fedshard::federation {

std::vector<double> weights_of(WeightPolicy policy, std::span<const std::int64_t> tokens) {
  const std::int64_t total = std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0});
  if (policy == WeightPolicy::uniform || total == 0) {
    return std::vector<double>(tokens.size(), 1.0 / static_cast<double>(tokens.size()));
  }
  std::vector<double> weights;
  for (const std::int64_t t : tokens) weights.push_back(static_cast<double>(t) / static_cast<double>(total));
  return weights;
}

}  // namespace fedshard::federation
