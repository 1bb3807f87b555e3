// A fingerprint of parameters that doesn't depend on the layout: the sum modulo 2^64, over all elements, of a mix of
// the element's global index and its bits as fp32 (so that bf16 and the same values in fp32 agree). Partial sums of
// disjoint parts add up to the whole's, in any order.
#pragma once
#include <array>
#include <cstdint>

#include "fedshard/comm/axes.h"
#include "fedshard/plan/units.h"
#include "fedshard/shard/arena.h"

namespace fedshard::shard {

// Of what this rank's arena holds of what rounds of `plan` exchange (padding left out).
std::uint64_t partial_digest(const plan::ModelPlan& plan, const Arena& arena);

// Of its group-local parameters, which only the replicas of a group share; 0 where there are none.
std::uint64_t partial_group_local_digest(const plan::ModelPlan& plan, const Arena& arena);

// Of all parameters that rounds exchange, the same on every rank. Collective over the world. Throws RunError on every
// rank, naming two ranks, where replicas of a group or whole groups hold different parameters: what groups have
// averaged must be equal everywhere, whatever they did before, and what is group-local in the replicas of a group.
std::uint64_t agreed_digest(const plan::ModelPlan& plan, const Arena& arena, comm::Axes& axes);

// Numbers travel as doubles, so a digest does as two halves.
std::array<double, 2> halves_of(std::uint64_t digest);

// Of one element; exposed for tests.
std::uint64_t mix(std::uint64_t global_index, std::uint32_t bits);

}  // namespace fedshard::shard
