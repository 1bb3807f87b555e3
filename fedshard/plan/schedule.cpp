#include "fedshard/plan/schedule.h"

#include <algorithm>

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

// One forward, recompute or backward computation, in the order in which they run.
struct Computation {
  OpKind kind = OpKind::forward;
  int stage = 0;
  int micro_step = 0;
  bool reads_parameters = true;
};

// The computations between which a unit is gathered, both included, and the one before which its gather is issued.
struct Residency {
  int unit = 0;
  int first = 0;
  int last = 0;
  int issued_before = 0;
  int micro_step = 0;
};

std::vector<Computation> computations_of(const ModelPlan& plan, const ScheduleOptions& options, bool backward) {
  std::vector<Computation> list;
  const int stages = static_cast<int>(plan.stages.size()), first_trained = plan.first_trained_stage();
  for (int m = 0; m < options.micro_steps; ++m) {
    for (int s = 0; s < stages; ++s) list.push_back({OpKind::forward, s, m, true});
    for (int s = stages - 1; backward && s >= first_trained; --s) {
      if (is_recomputed(plan, options, s)) list.push_back({OpKind::recompute, s, m, true});
      list.push_back({OpKind::backward, s, m, plan.stages[s].backward_reads_parameters});
    }
  }
  return list;
}

// When each unit is gathered. Two uses in one micro-step share a residency when nothing lies between them or when the
// unit stays gathered by intention. A gather is never issued before the unit's earlier residency has ended.
std::vector<Residency> residencies_of(const ModelPlan& plan, const std::vector<Computation>& list,
                                      const ScheduleOptions& options) {
  std::vector<Residency> result;
  std::vector<int> latest(plan.units.size(), -1);  // index into result
  const auto use = [&](int unit, int t) {
    const int previous = latest[unit];
    if (previous >= 0 && result[previous].micro_step == list[t].micro_step) {
      const bool stays = plan.stages_of(unit) > 1 || !options.reshard_after_forward;
      if (stays || t == result[previous].last + 1) {
        result[previous].last = t;
        return;
      }
    }
    latest[unit] = static_cast<int>(result.size());
    const int earliest = previous >= 0 ? result[previous].last + 1 : 0;
    result.push_back({unit, t, t, std::max(t - options.prefetch, earliest), list[t].micro_step});
  };
  for (int t = 0; t < static_cast<int>(list.size()); ++t) {
    if (!list[t].reads_parameters) continue;
    for (const int unit : plan.stages[list[t].stage].units) use(unit, t);
  }
  return result;
}

// The units whose gradient is complete in its micro-step after backward t, and is to be reduced then.
std::vector<int> completed_units(const ModelPlan& plan, const ScheduleOptions& options, const Computation& c) {
  std::vector<int> units;
  if (c.kind != OpKind::backward) return units;
  if (!options.reduce_each_micro_step && c.micro_step + 1 < options.micro_steps) return units;
  for (const int unit : plan.stages[c.stage].units) {
    // A unit that the last stage shares with the first waits for that one.
    const bool again = plan.stages_of(unit) > 1 && c.stage > 0;
    if (!plan.units[unit].frozen && !again) units.push_back(unit);
  }
  return units;
}

void append_passes(const ModelPlan& plan, const ScheduleOptions& options, bool backward, Schedule& schedule) {
  const std::vector<Computation> list = computations_of(plan, options, backward);
  const std::vector<Residency> residencies = residencies_of(plan, list, options);
  // By computation; a scan of all residencies for each would take seconds for hundreds of micro-steps.
  std::vector<std::vector<int>> issued_before(list.size()), ended_by(list.size());
  for (int r = 0; r < static_cast<int>(residencies.size()); ++r) {
    issued_before[residencies[r].issued_before].push_back(r);
    ended_by[residencies[r].last].push_back(r);
  }
  std::vector<int> reduced;  // that are yet to step, of the latest backward
  for (int t = 0; t < static_cast<int>(list.size()); ++t) {
    for (const int r : issued_before[t]) {
      schedule.push_back({OpKind::gather, residencies[r].unit, -1, residencies[r].micro_step});
    }
    const Computation& c = list[t];
    schedule.push_back({c.kind, -1, c.stage, c.micro_step});
    const std::vector<int> completed = completed_units(plan, options, c);
    for (const int unit : completed) schedule.push_back({OpKind::reduce, unit, -1, c.micro_step});
    for (const int r : ended_by[t]) {
      schedule.push_back({OpKind::release, residencies[r].unit, -1, residencies[r].micro_step});
    }
    if (!options.fused_backward || completed.empty()) continue;
    for (const int unit : reduced) schedule.push_back({OpKind::step, unit});
    reduced = completed;
  }
  for (const int unit : reduced) schedule.push_back({OpKind::step, unit});
}

}  // namespace

const char* name_of(OpKind kind) {
  constexpr const char* kNames[] = {"gather", "forward", "release",  "recompute", "backward",
                                    "reduce", "step",    "exchange", "apply"};
  return kNames[static_cast<int>(kind)];
}

std::string describe(const ModelPlan& plan, const Op& op) {
  std::string text = op.micro_step >= 0 ? fmt::format("m{} {}", op.micro_step, name_of(op.kind)) : name_of(op.kind);
  if (op.stage >= 0) return text + " " + plan.stages[op.stage].name;
  if (op.fragment >= 0) return fmt::format("{} fragment {}", text, op.fragment);
  return op.unit >= 0 ? text + " " + plan.units[op.unit].name : text;
}

bool is_recomputed(const ModelPlan& plan, const ScheduleOptions& options, int stage) {
  return options.recompute && stage > 0 && stage + 1 < static_cast<int>(plan.stages.size()) &&
         stage >= plan.first_trained_stage();
}

bool keeps_graph(const ModelPlan& plan, const ScheduleOptions& options, int stage) {
  return stage >= plan.first_trained_stage() && !is_recomputed(plan, options, stage);
}

Schedule step_schedule(const ModelPlan& plan, const ScheduleOptions& options) {
  base::require(options.micro_steps >= 1 && options.prefetch >= 0, "{} micro-steps with prefetch {}",
                options.micro_steps, options.prefetch);
  base::require(!options.fused_backward || options.micro_steps == 1,
                "a unit cannot step in its backward: {} micro-steps add to its gradient", options.micro_steps);
  Schedule schedule;
  append_passes(plan, options, true, schedule);
  for (int u = 0; !options.fused_backward && u < static_cast<int>(plan.units.size()); ++u) {
    if (!plan.units[u].frozen) schedule.push_back({OpKind::step, u});
  }
  return schedule;
}

Schedule evaluation_schedule(const ModelPlan& plan, int prefetch) {
  Schedule schedule;
  append_passes(plan, {.prefetch = prefetch}, false, schedule);
  return schedule;
}

}  // namespace fedshard::plan
