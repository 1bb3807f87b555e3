// How much each group counts in an average.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace fedshard::federation {

enum class WeightPolicy { tokens, uniform };

// One weight a participant, summing to 1. Under `tokens` a group without tokens since the last round weighs nothing (it
// receives the average of the others). Where no participant has any, as when all have skipped their steps, all weigh
// the same: they differ in nothing that training has done.
std::vector<double> weights_of(WeightPolicy policy, std::span<const std::int64_t> tokens);

}  // namespace fedshard::federation
