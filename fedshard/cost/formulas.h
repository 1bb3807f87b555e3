// What a layout sends, in closed form (docs/walkthrough.md; the same sums as the counters of a run, to the byte).
//
// All figures are payload bytes over ALL ranks of the world, so that they are whole numbers for every layout and unit
// size: per rank they may differ where a shard doesn't divide. Sums over the groups, whatever their sizes and degrees.
#pragma once
#include <cstdint>

#include "fedshard/plan/compression.h"
#include "fedshard/plan/schedule.h"
#include "fedshard/plan/updates.h"
#include "fedshard/topology/layout.h"
#include "fedshard/topology/scheme.h"

namespace fedshard::cost {

struct TrafficOptions {
  plan::ScheduleOptions schedule;
  std::int64_t bytes_gather = 2;       // of an element, b_g: the compute dtype's
  std::int64_t bytes_reduce = 4;       // b_r
  std::int64_t bytes_aggregate = 4;    // b_a: the master parameters'
  plan::UpdateOptions updates = {};    // Muon's gathers whole matrices
  plan::Compression compression = {};  // of what goes between groups in a round
  topology::ExchangeRules exchange = {};
  bool average_moments = false;  // of the inner optimizers, at every round
};

struct Bytes {
  std::int64_t gather = 0, reduce = 0, replica = 0;  // always inside a group
  std::int64_t aggregate_inside = 0;                 // between the replicas of a group
  std::int64_t aggregate_between = 0;                // between groups
  std::int64_t inside() const { return gather + reduce + replica + aggregate_inside; }
  std::int64_t between() const { return aggregate_between; }
  Bytes& operator+=(const Bytes& more);
  bool operator==(const Bytes&) const = default;
};
Bytes operator+(Bytes a, const Bytes& b);
Bytes operator*(Bytes once, std::int64_t times);

// How often a unit is gathered in a micro-step: kappa_g. Once, or twice where it is released after its forward and its
// backward (or the forward once more before it) reads it again.
int gathers_of(const plan::ModelPlan& plan, int unit, bool reshard_after_forward);

// One step of training, all micro-steps. In a group of S = F R ranks S (F-1) ceil(N_u/F) (kappa_g b_g + b_r) for each
// unit and micro-step, and 2 F ceil(N_u/F) b_r for the replicas; the terms with b_r once a step where reductions
// are left to the last micro-step, and not at all for frozen units. Muon gathers each unit with matrices of its once
// more, in fp32: S (F-1) ceil(N_u/F) 4, whatever the number of micro-steps. Throws what plan::update_rules throws.
Bytes step_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options);

// The same of one group alone.
Bytes group_step_bytes(const plan::ModelPlan& plan, const topology::GroupShape& group, const TrafficOptions& options);

// The aggregation at the end of a round: 2 (G-1) N b_a between groups, however they are cut into shards, and
// N b_a inside each, with the schemes split and leader; R times the former and none of the latter with naive; N
// without frozen and group-local units. Buckets change no figure. Compressed, between groups 2 (G-1) times the encoded
// bytes of each part that a group owns: there is no closed form, since blocks end with their part, so the parts are
// gone through. Where the inner optimizers' moments are averaged, the same once more of 4 bytes each, not compressed.
Bytes round_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options);

// What a step of the synchronous warm-up sends beside step_bytes, to sum its fp32 gradients over the groups:
// 2 (G-1) N 4 between groups and N 4 inside each, or as naive has it; N without frozen units.
Bytes synchronous_bytes(const plan::ModelPlan& plan, const topology::Layout& layout,
                        const topology::ExchangeRules& rules = {});

// The end of the warm-up, when all groups take one's parameters: what a round sends that is not compressed.
Bytes warm_up_end_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options);

// One forward pass of all ranks: S (F-1) ceil(N_u/F) b_g for each group and unit.
Bytes forward_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options);

}  // namespace fedshard::cost
