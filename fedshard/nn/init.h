// Initial values from counter-based random numbers: an element's value is a pure function of the seed, its global index
// and its initialiser, so any rank fills exactly its slice, in any order, and every layout starts with the same bits.
//
// Philox needs no state to hand over: element g takes lane g % 4 of the block with counter g / 4. The normal variates
// come from Box-Muller in scalar double precision, rounded once to fp32, so that no vector unit changes a bit (they do
// depend on the C library's log, sin and cos: machines with the same one agree).
#pragma once
#include <array>
#include <cstdint>
#include <span>

#include "fedshard/plan/units.h"

namespace fedshard::nn {

// Philox-4x32-10: ten rounds of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, section 4.3.
std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

// The standard normal variate of element `index` of the stream `seed`.
float normal_at(std::uint64_t seed, std::uint64_t index);

// Fills `out` (end - begin values) with the initial values of the elements [begin, end) of a unit, counted within the
// unit in the order of its parameters. Throws RunError where the slice does not lie in the unit (a bug of the
// caller's).
void initialize_slice(const plan::ModelPlan& plan, std::uint64_t seed, int unit, std::int64_t begin, std::int64_t end,
                      std::span<float> out);

}  // namespace fedshard::nn
