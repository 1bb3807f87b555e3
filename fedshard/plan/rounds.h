// When groups exchange what: the rounds over the steps of a run, as operations that follow each step. The trainer runs
// them, and tests check them.
//
// A surprise: with several fragments a round of K steps has as many exchanges, one a fragment, staggered over it. Each
// is numbered as a round of its own, so that the coordinator and the records know of one kind alone.
#pragma once
#include <cstdint>
#include <vector>

#include "fedshard/plan/schedule.h"

namespace fedshard::plan {

struct RoundOptions {
  std::int64_t every = 8;       // K: steps from one exchange of a fragment to its next
  int fragments = 1;            // parts of the model that are exchanged apart
  std::int64_t delay = 0;       // steps from the exchange's begin to its application
  std::int64_t start_step = 0;  // steps before the first round
};

// Throws UsageError unless every and fragments are at least 1, fragments is at most every, and delay is from 0 to the
// steps between two exchanges, floor(every / fragments): one is under way at a time.
void check_rounds(const RoundOptions& options);

// What follows step `step` (counted from 1), in order: an exchange is begun, or what it has brought is applied.
// Fragment f's exchange begins ceil((f + 1) K / n) steps into each round of K steps, so the last one's where the round
// ends.
Schedule round_operations(const RoundOptions& options, std::int64_t step);

// One round's steps as they come again and again, each with what follows it; with a delay the first operations are the
// end of the round before.
Schedule round_schedule(const ModelPlan& plan, const ScheduleOptions& options, const RoundOptions& rounds);

// How often a run of `steps` steps begins the exchange of a fragment.
std::int64_t exchanges_of(const RoundOptions& options, int fragment, std::int64_t steps);

// By fragment, `plan` with the units that are not in it group-local, so that whatever goes by what a plan exchanges
// goes by the fragment's. The units that are exchanged are dealt in turn: each fragment has some of every depth (the
// strided pattern of Streaming DiLoCo, arXiv 2501.18512). Throws UsageError where there are fewer such units than
// fragments.
std::vector<ModelPlan> fragment_plans(const ModelPlan& plan, int fragments);

}  // namespace fedshard::plan
