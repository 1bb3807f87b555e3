#include "fedshard/plan/schedule.h"

#include <algorithm>

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

// One forward or backward computation, in the order in which they run.
struct Computation {
  OpKind kind = OpKind::forward;
  int stage = 0;
  int unit = 0;
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

std::vector<Computation> computations_of(const ModelPlan& plan, int micro_steps, bool backward) {
  std::vector<Computation> list;
  const int stages = static_cast<int>(plan.stages.size());
  for (int m = 0; m < micro_steps; ++m) {
    for (int s = 0; s < stages; ++s) list.push_back({OpKind::forward, s, plan.stages[s].unit, m, true});
    for (int s = stages - 1; backward && s >= 0; --s) {
      list.push_back({OpKind::backward, s, plan.stages[s].unit, m, plan.stages[s].backward_reads_parameters});
    }
  }
  return list;
}

bool is_shared(const ModelPlan& plan, int unit) {
  return std::count_if(plan.stages.begin(), plan.stages.end(), [&](const StageSpec& s) { return s.unit == unit; }) > 1;
}

// When each unit is gathered. Two uses in one micro-step share a residency when nothing lies between them or when the
// unit stays gathered by intention. A gather is never issued before the unit's earlier residency has ended.
std::vector<Residency> residencies_of(const ModelPlan& plan, const std::vector<Computation>& list,
                                      const ScheduleOptions& options) {
  std::vector<Residency> result;
  std::vector<int> latest(plan.units.size(), -1);  // index into result
  for (int t = 0; t < static_cast<int>(list.size()); ++t) {
    const Computation& c = list[t];
    if (!c.reads_parameters) continue;
    const int previous = latest[c.unit];
    if (previous >= 0 && result[previous].micro_step == c.micro_step) {
      const bool stays = is_shared(plan, c.unit) || !options.reshard_after_forward;
      if (stays || t == result[previous].last + 1) {
        result[previous].last = t;
        continue;
      }
    }
    latest[c.unit] = static_cast<int>(result.size());
    const int earliest = previous >= 0 ? result[previous].last + 1 : 0;
    result.push_back({c.unit, t, t, std::max(t - options.prefetch, earliest), c.micro_step});
  }
  return result;
}

// The last computation of each micro-step that adds to a unit's gradient.
bool completes_gradient(const std::vector<Computation>& list, std::size_t t) {
  for (std::size_t later = t + 1; later < list.size() && list[later].micro_step == list[t].micro_step; ++later) {
    if (list[later].unit == list[t].unit) return false;
  }
  return list[t].kind == OpKind::backward;
}

void append_passes(const ModelPlan& plan, const ScheduleOptions& options, bool backward, Schedule& schedule) {
  const std::vector<Computation> list = computations_of(plan, options.micro_steps, backward);
  const std::vector<Residency> residencies = residencies_of(plan, list, options);
  // By computation; a scan of all residencies for each would take seconds for hundreds of micro-steps.
  std::vector<std::vector<int>> issued_before(list.size()), ended_by(list.size());
  for (int r = 0; r < static_cast<int>(residencies.size()); ++r) {
    issued_before[residencies[r].issued_before].push_back(r);
    ended_by[residencies[r].last].push_back(r);
  }
  for (int t = 0; t < static_cast<int>(list.size()); ++t) {
    for (const int r : issued_before[t]) {
      schedule.push_back({OpKind::gather, residencies[r].unit, -1, residencies[r].micro_step});
    }
    const Computation& c = list[t];
    schedule.push_back({c.kind, c.unit, c.stage, c.micro_step});
    if (completes_gradient(list, static_cast<std::size_t>(t))) {
      schedule.push_back({OpKind::reduce, c.unit, -1, c.micro_step});
    }
    for (const int r : ended_by[t]) {
      schedule.push_back({OpKind::release, residencies[r].unit, -1, residencies[r].micro_step});
    }
  }
}

}  // namespace

const char* name_of(OpKind kind) {
  constexpr const char* kNames[] = {"gather", "forward", "release", "backward", "reduce", "step", "exchange", "apply"};
  return kNames[static_cast<int>(kind)];
}

std::string describe(const ModelPlan& plan, const Op& op) {
  std::string text = op.micro_step >= 0 ? fmt::format("m{} {}", op.micro_step, name_of(op.kind)) : name_of(op.kind);
  if (op.stage >= 0) return text + " " + plan.stages[op.stage].name;
  return op.unit >= 0 ? text + " " + plan.units[op.unit].name : text;
}

Schedule step_schedule(const ModelPlan& plan, const ScheduleOptions& options) {
  base::require(options.micro_steps >= 1 && options.prefetch >= 0, "{} micro-steps with prefetch {}",
                options.micro_steps, options.prefetch);
  Schedule schedule;
  append_passes(plan, options, true, schedule);
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) schedule.push_back({OpKind::step, u});
  return schedule;
}

Schedule evaluation_schedule(const ModelPlan& plan, int prefetch) {
  Schedule schedule;
  append_passes(plan, {.micro_steps = 1, .reshard_after_forward = true, .prefetch = prefetch}, false, schedule);
  return schedule;
}

Schedule round_schedule(const ModelPlan& plan, const ScheduleOptions& options, int every) {
  Schedule schedule;
  for (int step = 0; step < every; ++step) {
    const Schedule one = step_schedule(plan, options);
    schedule.insert(schedule.end(), one.begin(), one.end());
  }
  schedule.push_back({OpKind::exchange});
  schedule.push_back({OpKind::apply});
  return schedule;
}

}  // namespace fedshard::plan
