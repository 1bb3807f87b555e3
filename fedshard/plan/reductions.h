// The reductions under way during a step, and the rule that bounds how many gradient buffers are in use.
//
// The engine asks it when to wait, and the memory forecast walks a schedule with the same rule. So the bytes that are
// stated before the first step can't drift apart from what a step takes.
#pragma once
#include <algorithm>
#include <deque>
#include <vector>

#include "fedshard/plan/schedule.h"

namespace fedshard::plan {

struct Reduction {
  int unit = 0;
  bool add = false;  // to what earlier micro-steps left in the arena
};

class ReductionQueue {
 public:
  // Without `reduce_each_micro_step` a unit's only reduction is that of the last one.
  ReductionQueue(const ModelPlan& plan, bool reduce_each_micro_step) : each_(reduce_each_micro_step) {
    for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
      const auto stage = std::find_if(plan.stages.begin(), plan.stages.end(), [&](const auto& s) { return s.uses(u); });
      stages_.push_back(static_cast<int>(stage - plan.stages.begin()));
    }
  }

  // Takes note of a `reduce` operation that begins.
  void begin(const Op& op) { under_way_.push_back({op.unit, each_ && op.micro_step > 0}); }
  bool empty() const { return under_way_.empty(); }
  const std::deque<Reduction>& under_way() const { return under_way_; }  // oldest first

  // Whether the oldest reduction must be over before a backward of `unit` may begin. A unit's buffer is free again when
  // its earlier reduction is over. The buffers of at most two stages are in use at a time (and those of units shared by
  // the first and last stage): this unit's, and one whose reductions run meanwhile.
  bool must_finish_before(int unit, bool has_gradients) const {
    return is_reducing(unit) || (!has_gradients && !under_way_.empty() &&
                                 stages_[under_way_.front().unit] != stages_[under_way_.back().unit]);
  }

  bool is_reducing(int unit) const {
    return std::any_of(under_way_.begin(), under_way_.end(), [&](const Reduction& r) { return r.unit == unit; });
  }

  // The oldest reduction, which the caller finishes now. There must be one.
  Reduction take_oldest() {
    const Reduction oldest = under_way_.front();
    under_way_.pop_front();
    return oldest;
  }

 private:
  bool each_;
  std::vector<int> stages_;  // by unit, the one whose backward completes its gradient
  std::deque<Reduction> under_way_;
};

}  // namespace fedshard::plan
