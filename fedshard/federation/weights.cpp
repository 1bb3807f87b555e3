#include "fedshard/federation/weights.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "fedshard/base/error.h"

namespace fedshard::federation {

std::vector<double> weights_of(const WeightPolicy& policy, std::span<const std::int64_t> tokens,
                               const std::vector<bool>& left_out) {
  const std::size_t groups = tokens.size();
  base::require(policy.by != WeighBy::fixed || policy.fixed.size() == groups, "{} fixed weights for {} groups",
                policy.fixed.size(), groups);
  std::vector<double> present(groups, 1), shares(groups, 1);
  for (std::size_t g = 0; g < groups; ++g) {
    if (!left_out.empty() && left_out.at(g)) present[g] = 0;
    if (policy.by == WeighBy::tokens) shares[g] = static_cast<double>(tokens[g]);
    if (policy.by == WeighBy::fixed) shares[g] = policy.fixed[g];
    shares[g] *= present[g];
  }
  double total = std::accumulate(shares.begin(), shares.end(), 0.0);
  if (std::isinf(total)) {  // of huge numbers: only their ratios count
    const double largest = *std::max_element(shares.begin(), shares.end());
    for (double& share : shares) share /= largest;
    total = std::accumulate(shares.begin(), shares.end(), 0.0);
  }
  if (total == 0) {
    shares = present;
    total = std::accumulate(shares.begin(), shares.end(), 0.0);
  }
  base::require(total > 0, "no group is left to be averaged");
  for (double& share : shares) share /= total;
  return shares;
}

}  // namespace fedshard::federation
