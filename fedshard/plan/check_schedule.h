// Proves a schedule right, operation by operation. It knows the rules and nothing of how schedules are made, so it can
// also be given the order that a real run recorded.
#pragma once
#include <string>
#include <vector>

#include "fedshard/plan/schedule.h"

namespace fedshard::plan {

// What is wrong with `schedule` as one step of training, one sentence a fault; empty when all of this holds:
// - every computation happens once a micro-step, forward in order, backward in reverse order down to the first stage
//   that trains, micro-steps in turn; what is recomputed is so right before its backward;
// - a unit is gathered when a computation reads it, is not gathered twice without a release, and nothing stays
// gathered;
// - with prefetch, the gather of what the next computation reads is issued before the present one computes (unless that
//   unit had yet to be released);
// - with resharding, no more than the units of 1 + prefetch stages, and those shared by the first and last stage, are
//   gathered at once;
// - a unit that trains is reduced once a micro-step (or once, in the last), after its last backward of it, and steps
//   once, after its last reduction; a frozen one never.
std::vector<std::string> check_step_schedule(const ModelPlan& plan, const ScheduleOptions& options,
                                             const Schedule& schedule);

}  // namespace fedshard::plan
