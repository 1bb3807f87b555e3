// One step as data: the stream of operations that the engine runs, the checker proves things about, and a simulator can
// time. It follows from the model's plan and a few options alone, without torch.
//
// Operations are listed in the order in which they are issued. `gather` and `reduce` only begin there: a gather is over
// before the first use of its unit, a reduction before its unit's `step`. Everything else happens at its place.
#pragma once
#include <string>
#include <vector>

#include "fedshard/plan/units.h"

namespace fedshard::plan {

enum class OpKind { gather, forward, release, recompute, backward, reduce, step, exchange, apply };
const char* name_of(OpKind kind);

struct Op {
  OpKind kind = OpKind::gather;
  int unit = -1;        // of gather, release, reduce and step
  int stage = -1;       // of forward, recompute and backward
  int micro_step = -1;  // -1 for step, exchange and apply
  int fragment = -1;    // of exchange and apply (rounds.h)
  bool operator==(const Op&) const = default;
};
std::string describe(const ModelPlan& plan, const Op& op);  // "m0 gather model.layers.1"

struct ScheduleOptions {
  int micro_steps = 1;
  bool reshard_after_forward = true;  // release a unit after its forward and gather it again for its backward
  int prefetch = 1;                   // how many computations ahead a gather is issued; 0: right before its use
  bool recompute = false;             // keep no activations inside a stage: its forward runs again before its backward
  // Reduce a unit's gradient in each micro-step (the smallest memory), or keep it whole and reduce it in the last one.
  bool reduce_each_micro_step = true;
  bool fused_backward = false;  // step a unit when its reduction is over, not when all are
};
using Schedule = std::vector<Op>;

// Whether `recompute` makes the stage drop its activations after its forward and compute them again.
bool is_recomputed(const ModelPlan& plan, const ScheduleOptions& options, int stage);

// Whether a step's forward of the stage keeps its graph for the backward: it trains, and is not recomputed.
bool keeps_graph(const ModelPlan& plan, const ScheduleOptions& options, int stage);

// One step of training: for every micro-step the forward and backward passes, and `step` for every unit; at the end, or
// (fused_backward, of one micro-step) while the next unit's reduction runs.
//
// The last stage's unit is gathered once a micro-step, because its backward follows its forward at once; a stage whose
// backward doesn't read its parameters is not gathered for it; a unit shared by the first and the last stage stays
// gathered between them. A unit is reduced right after the last backward that adds to its gradient. No backward comes
// before the first stage that has something to train, and frozen units are neither reduced nor stepped. The first and
// the last stage are never recomputed: the one has nothing to drop, the other's backward follows its forward.
Schedule step_schedule(const ModelPlan& plan, const ScheduleOptions& options);

// A forward pass alone.
Schedule evaluation_schedule(const ModelPlan& plan, int prefetch);

}  // namespace fedshard::plan
