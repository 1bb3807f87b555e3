// How much each group counts in an average.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace fedshard::federation {

enum class WeighBy {
  tokens,  // that the group has trained on since the last round
  group,   // all groups alike
  fixed,   // a list
};

struct WeightPolicy {
  WeighBy by = WeighBy::tokens;
  std::vector<double> fixed = {};  // by group, with WeighBy::fixed: finite, none below 0, not all 0
};

// One weight a participant, summing to 1. A group whose share is nothing (no tokens since the last round, a fixed 0) or
// that is left out (left_out[g]; empty: none is) weighs nothing: it receives the average of the others. Where no share
// is left, as when all groups have skipped their steps, all that are not left out weigh the same: they differ in
// nothing that training has done. Throws RunError where all are left out or a list has another length.
std::vector<double> weights_of(const WeightPolicy& policy, std::span<const std::int64_t> tokens,
                               const std::vector<bool>& left_out = {});

}  // namespace fedshard::federation
