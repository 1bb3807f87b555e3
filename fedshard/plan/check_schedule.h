// Proves a schedule right, operation by operation. It knows the rules and nothing of how schedules are made, so it can
// also be given the order that a real run recorded.
#pragma once
#include <string>
#include <vector>

#include "fedshard/plan/schedule.h"

namespace fedshard::plan {

// What is wrong with `schedule` as one step of training, one sentence a fault; empty when all of this holds:
// - every computation happens once a micro-step, forward in order, backward in reverse order, micro-steps in turn;
// - a unit is gathered when a computation reads it, is not gathered twice without a release, and nothing stays
// gathered;
// - with prefetch, the gather of what the next computation reads is issued before the present one computes (unless that
//   unit had yet to be released);
// - with resharding, no more than 1 + prefetch units, and a unit shared by the first and last stage, are gathered at
// once;
// - a unit is reduced once a micro-step, after its last backward; and steps once, after its last reduction.
std::vector<std::string> check_step_schedule(const ModelPlan& plan, const ScheduleOptions& options,
                                             const Schedule& schedule);

}  // namespace fedshard::plan
