// A step of all groups together: their gradients are summed by the owner exchange (exchange.h), so every group makes
// the same update.
//
// A surprise: the norm is not taken where gradients are summed inside a group. Groups of other shapes would add up its
// squares in another order, clip by a factor that differs in its last bit, and part.
#pragma once
#include "fedshard/comm/axes.h"
#include "fedshard/federation/exchange.h"
#include "fedshard/shard/engine.h"

namespace fedshard::federation {

// For shard::GradientHooks::sum_over_groups. gradients: this rank's shard of the sums over its group, in an arena with
// room for all units that train; afterwards of the sums over all groups, added up in group order in fp64 and rounded
// once to the arena's dtype. Both they and the result have the same bits in all groups, whatever their layouts.
// Sends 2 (G-1) N elements between groups and N inside each, as Purpose::aggregate. Collective over the world.
shard::StepSums sum_over_groups(Exchange& exchange, comm::Axes& axes, const shard::Arena& gradients,
                                const shard::StepSums& of_group);

}  // namespace fedshard::federation
