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
    for (const StageSpec& stage : plan.stages) most_units_ = std::max(most_units_, stage.units.size());
  }

  std::vector<std::string> run() {
    expect_order_of_computations();
    for (std::size_t i = 0; i < schedule_.size(); ++i) take(i);
    for (int u = 0; u < static_cast<int>(gathered_.size()); ++u) {
      if (gathered_[u]) faults_.push_back(fmt::format("unit '{}' is still gathered at the end", plan_.units[u].name));
      if (steps_[u] != (plan_.units[u].frozen ? 0 : 1)) {
        faults_.push_back(fmt::format("unit '{}' steps {} times", plan_.units[u].name, steps_[u]));
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

  static bool computes(const Op& op) {
    return op.kind == OpKind::forward || op.kind == OpKind::recompute || op.kind == OpKind::backward;
  }
  // What the computation needs gathered.
  std::vector<int> reads(const Op& op) const {
    const StageSpec& stage = plan_.stages[op.stage];
    return op.kind == OpKind::backward && !stage.backward_reads_parameters ? std::vector<int>{} : stage.units;
  }

  void expect_order_of_computations() {
    std::vector<Op> expected, found;
    const int last = static_cast<int>(plan_.stages.size()) - 1;
    const auto trains = [&](int s) {
      return std::any_of(plan_.stages[s].units.begin(), plan_.stages[s].units.end(),
                         [&](int u) { return !plan_.units[u].frozen; });
    };
    int first_trained = 0;
    while (first_trained < last && !trains(first_trained)) ++first_trained;
    for (int m = 0; m < options_.micro_steps; ++m) {
      for (int s = 0; s <= last; ++s) expected.push_back({OpKind::forward, -1, s, m});
      for (int s = last; s >= first_trained; --s) {
        if (options_.recompute && s > 0 && s < last) expected.push_back({OpKind::recompute, -1, s, m});
        expected.push_back({OpKind::backward, -1, s, m});
      }
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
      case OpKind::recompute:
      case OpKind::backward:
        check_computation(i);
        break;
      case OpKind::reduce:
        check_reduce(i);
        break;
      case OpKind::step:
        ++steps_[op.unit];
        if (reductions_[op.unit] != (options_.reduce_each_micro_step ? options_.micro_steps : 1)) {
          fault(i, "{} reductions came before", reductions_[op.unit]);
        }
        break;
      case OpKind::exchange:
      case OpKind::apply:
        fault(i, "does not belong into a step");
        break;
    }
  }

  void check_computation(std::size_t i) {
    const Op& op = schedule_[i];
    for (const int unit : reads(op)) {
      if (!gathered_[unit]) fault(i, "unit '{}' is not gathered", plan_.units[unit].name);
    }
    if (op.kind == OpKind::backward) {
      for (const int unit : plan_.stages[op.stage].units) ++backwards_[{unit, op.micro_step}];
    }
    if (options_.prefetch > 0) check_prefetch(i);
  }

  void check_crowd(std::size_t i) {
    if (!options_.reshard_after_forward) return;
    std::size_t others = 0;
    for (int u = 0; u < static_cast<int>(gathered_.size()); ++u) others += gathered_[u] && plan_.stages_of(u) == 1;
    if (others > most_units_ * (1 + options_.prefetch)) fault(i, "{} units are gathered at once", others);
  }

  // What the next computation reads must be gathered, or under way, by now.
  void check_prefetch(std::size_t i) {
    std::size_t next = i + 1;
    std::vector<int> released_between;
    for (; next < schedule_.size() && !computes(schedule_[next]); ++next) {
      if (schedule_[next].kind == OpKind::release) released_between.push_back(schedule_[next].unit);
    }
    if (next == schedule_.size()) return;
    const std::vector<int> mine = plan_.stages[schedule_[i].stage].units;
    for (const int unit : reads(schedule_[next])) {
      const bool again = std::count(released_between.begin(), released_between.end(), unit) > 0 &&
                         std::count(mine.begin(), mine.end(), unit) > 0;
      if (!gathered_[unit] && !again) {
        fault(i, "the next computation's unit '{}' is not yet being gathered", plan_.units[unit].name);
      }
    }
  }

  void check_reduce(std::size_t i) {
    const Op& op = schedule_[i];
    if (plan_.units[op.unit].frozen) fault(i, "the unit is frozen");
    if (backwards_[{op.unit, op.micro_step}] != plan_.stages_of(op.unit)) fault(i, "the gradient is not complete");
    const int expected = options_.reduce_each_micro_step ? op.micro_step + 1 : 1;
    if (++reductions_[op.unit] != expected) fault(i, "reduction {} of the unit", reductions_[op.unit]);
    if (!options_.reduce_each_micro_step && op.micro_step + 1 != options_.micro_steps) {
      fault(i, "the unit is reduced before the last micro-step");
    }
  }

  const ModelPlan& plan_;
  const ScheduleOptions& options_;
  const Schedule& schedule_;
  std::vector<bool> gathered_;
  std::size_t most_units_ = 0;                    // that one stage reads
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
