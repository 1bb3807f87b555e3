#include "fedshard/plan/check_schedule.h"

#include <algorithm>
#include <map>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

class Checker {
 public:
  Checker(const ModelPlan& plan, const ScheduleOptions& options, const Schedule& schedule)
      : plan_(plan), options_(options), schedule_(schedule), gathered_(plan.units.size(), false) {
    for (std::size_t u = 0; u < plan.units.size(); ++u) {
      shared_.push_back(std::count_if(plan.stages.begin(), plan.stages.end(),
                                      [&](const StageSpec& s) { return s.unit == static_cast<int>(u); }) > 1);
    }
  }

  std::vector<std::string> run() {
    expect_order_of_computations();
    for (std::size_t i = 0; i < schedule_.size(); ++i) take(i);
    for (std::size_t u = 0; u < gathered_.size(); ++u) {
      if (gathered_[u]) faults_.push_back(fmt::format("unit '{}' is still gathered at the end", plan_.units[u].name));
      if (steps_[static_cast<int>(u)] != 1) {
        faults_.push_back(fmt::format("unit '{}' steps {} times", plan_.units[u].name, steps_[static_cast<int>(u)]));
      }
    }
    return std::move(faults_);
  }

 private:
  template <class... Args>
  void fault(std::size_t i, fmt::format_string<Args...> format, Args&&... args) {
    faults_.push_back(fmt::format("operation {} ({}): {}", i, describe(plan_, schedule_[i]),
                                  fmt::format(format, std::forward<Args>(args)...)));
  }

  static bool computes(const Op& op) { return op.kind == OpKind::forward || op.kind == OpKind::backward; }
  bool reads(const Op& op) const {
    return op.kind == OpKind::forward ||
           (op.kind == OpKind::backward && plan_.stages[op.stage].backward_reads_parameters);
  }

  void expect_order_of_computations() {
    std::vector<Op> expected, found;
    const int stages = static_cast<int>(plan_.stages.size());
    for (int m = 0; m < options_.micro_steps; ++m) {
      for (int s = 0; s < stages; ++s) expected.push_back({OpKind::forward, plan_.stages[s].unit, s, m});
      for (int s = stages - 1; s >= 0; --s) expected.push_back({OpKind::backward, plan_.stages[s].unit, s, m});
    }
    std::copy_if(schedule_.begin(), schedule_.end(), std::back_inserter(found), computes);
    if (found != expected) faults_.push_back("the computations are not the forward and backward passes in order");
  }

  void take(std::size_t i) {
    const Op& op = schedule_[i];
    switch (op.kind) {
      case OpKind::gather:
        if (gathered_[op.unit]) fault(i, "the unit is already gathered");
        gathered_[op.unit] = true;
        check_crowd(i);
        break;
      case OpKind::release:
        if (!gathered_[op.unit]) fault(i, "the unit is not gathered");
        gathered_[op.unit] = false;
        break;
      case OpKind::forward:
      case OpKind::backward:
        if (reads(op) && !gathered_[op.unit]) fault(i, "the unit is not gathered");
        if (op.kind == OpKind::backward) ++backwards_[{op.unit, op.micro_step}];
        if (options_.prefetch > 0) check_prefetch(i);
        break;
      case OpKind::reduce:
        check_reduce(i);
        break;
      case OpKind::step:
        ++steps_[op.unit];
        if (reductions_[op.unit] != options_.micro_steps) fault(i, "{} reductions came before", reductions_[op.unit]);
        break;
      case OpKind::exchange:
      case OpKind::apply:
        fault(i, "does not belong into a step");
        break;
    }
  }

  void check_crowd(std::size_t i) {
    if (!options_.reshard_after_forward) return;
    int others = 0;
    for (std::size_t u = 0; u < gathered_.size(); ++u) others += gathered_[u] && !shared_[u];
    if (others > 1 + options_.prefetch) fault(i, "{} units are gathered at once", others);
  }

  // What the next computation reads must be gathered, or under way, by now.
  void check_prefetch(std::size_t i) {
    std::size_t next = i + 1;
    bool released_between = false;
    for (; next < schedule_.size() && !computes(schedule_[next]); ++next) {
      released_between |= schedule_[next].kind == OpKind::release && schedule_[next].unit == schedule_[i].unit;
    }
    if (next == schedule_.size() || !reads(schedule_[next]) || gathered_[schedule_[next].unit]) return;
    if (released_between && schedule_[next].unit == schedule_[i].unit) return;
    fault(i, "the next computation's unit '{}' is not yet being gathered", plan_.units[schedule_[next].unit].name);
  }

  void check_reduce(std::size_t i) {
    const Op& op = schedule_[i];
    const auto uses =
        std::count_if(plan_.stages.begin(), plan_.stages.end(), [&](const StageSpec& s) { return s.unit == op.unit; });
    if (backwards_[{op.unit, op.micro_step}] != uses) fault(i, "the unit's gradient is not complete");
    if (++reductions_[op.unit] != op.micro_step + 1) fault(i, "reduction {} of the unit", reductions_[op.unit]);
  }

  const ModelPlan& plan_;
  const ScheduleOptions& options_;
  const Schedule& schedule_;
  std::vector<bool> gathered_;
  std::vector<bool> shared_;
  std::map<std::pair<int, int>, int> backwards_;  // by unit and micro-step
  std::map<int, int> reductions_, steps_;         // by unit
  std::vector<std::string> faults_;
};

}  // namespace

std::vector<std::string> check_step_schedule(const ModelPlan& plan, const ScheduleOptions& options,
                                             const Schedule& schedule) {
  return Checker(plan, options, schedule).run();
}

}  // namespace fedshard::plan
