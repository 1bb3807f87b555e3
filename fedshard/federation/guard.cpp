#include "fedshard/federation/guard.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace fedshard::federation {
namespace {

// Of an even number of values the mean of the middle two; 0 of none.
double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t upper = values.size() / 2, lower = (values.size() - 1) / 2;
  return values[lower] / 2 + values[upper] / 2;
}

}  // namespace

std::vector<std::string> faults_of(std::span<const Contribution> contributions, double limit) {
  std::vector<std::string> faults;
  for (const Contribution& c : contributions) {
    faults.emplace_back(!std::isfinite(c.square) ? "it brings numbers that are not finite"
                        : c.replicas_differ      ? "its replicas hold different parameters"
                                                 : "");
  }
  if (limit <= 0) return faults;
  const std::vector<std::string> before = faults;
  for (std::size_t g = 0; g < faults.size(); ++g) {
    if (!before[g].empty()) continue;
    std::vector<double> others;
    for (std::size_t other = 0; other < faults.size(); ++other) {
      if (other != g && before[other].empty()) others.push_back(std::sqrt(contributions[other].square));
    }
    const double norm = std::sqrt(contributions[g].square), median = median_of(std::move(others));
    if (median == 0 || norm <= limit * median) continue;
    faults[g] = fmt::format("the norm of what it brings is {:.4g}, more than {:g} times the others' median of {:.4g}",
                            norm, limit, median);
  }
  return faults;
}

// Piece by piece: isfinite takes nearly twice the memory of what it looks at.
bool all_finite(const at::Tensor& values) {
  const std::vector<at::Tensor> pieces = values.split(1 << 16);
  return std::all_of(pieces.begin(), pieces.end(),
                     [](const at::Tensor& piece) { return at::isfinite(piece).all().item<bool>(); });
}

}  // namespace fedshard::federation
