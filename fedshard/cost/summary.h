// A layout's whole communication, counted: a step, a round's end, and flat FSDP beside them.
//
// A surprise: what crosses groups in flat FSDP is a question of how one looks, since it has none. It is seen with the
// groups of the layout that it is compared with: the same ranks in the same rooms.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "fedshard/cost/flows.h"
#include "fedshard/cost/fraction.h"
#include "fedshard/cost/tally.h"
#include "fedshard/plan/pace.h"

namespace fedshard::cost {

struct Setting {
  plan::ModelPlan plan;
  topology::Layout layout;
  TrafficOptions traffic;
  UnitUses uses;  // uses_of(plan, traffic), or what is asked about instead
  Algorithm algorithm = Algorithm::ring;
  Placement placement = {};
  int view_group = 0;  // see `crossing` with groups of so many ranks in order; 0: with the layout's own
  plan::Pace pace = {};
  int fragments = 1;
  std::int64_t local_batch_size = 1, micro_steps = 1, seq_len = 1;  // sequences a rank and micro-step; tokens
};

struct Summary {
  Tally step;                           // one step of all groups
  Tally round;                          // all that one round's exchanges bring, whole model; empty with one group
  Tally flat;                           // one step of FSDP over all ranks, with the same units, dtypes and placement
  std::int64_t collectives = 0;         // calls of a rank in a step, of the group that makes most
  std::int64_t flat_lower_bound = 0;    // bytes that no FSDP over all ranks can keep inside groups; see below
  std::optional<std::int64_t> steps;    // K: of the group that makes most in a round; none where only a run shows it
  std::vector<std::int64_t> sequences;  // behind one update, by group
  std::optional<std::int64_t> round_sequences;  // behind one round, of all groups

  // Of a step with its share of the round, where K is known.
  std::optional<Fraction> aggregate_per_step() const;  // bytes of the rank that sends most in rounds
  std::optional<Fraction> crossing_per_step() const;   // bytes between groups
  std::optional<Fraction> ratio_to_flat() const;       // of these to flat FSDP's; none where that has none
};

// The lower bound: each of the G groups needs what the others have: gathers bring (G-1) N b_g and reductions take
// (G-1) N b_r out of them, each as often as the schedule has it.
// Throws what step_flows throws, and UsageError where view_group does not fit the world.
Summary summarize(const Setting& setting);

}  // namespace fedshard::cost
