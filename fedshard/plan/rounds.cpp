#include "fedshard/plan/rounds.h"

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

// Steps into a round after which a fragment's exchange begins: ceil((f + 1) K / n), of a K of any size.
std::int64_t begin_of(const RoundOptions& options, int fragment) {
  const std::int64_t n = options.fragments, f = std::int64_t{fragment} + 1;
  return f * (options.every / n) + (f * (options.every % n) + n - 1) / n;
}

// The fragment whose exchange begins so many steps into a round (1 to every), or -1.
int fragment_at(const RoundOptions& options, std::int64_t step_of_round) {
  for (int f = 0; f < options.fragments; ++f) {
    if (begin_of(options, f) == step_of_round) return f;
  }
  return -1;
}

}  // namespace

void check_rounds(const RoundOptions& options) {
  if (options.every < 1) base::fail<base::UsageError>("a round has at least 1 step, not {}", options.every);
  if (options.fragments < 1 || options.fragments > options.every) {
    base::fail<base::UsageError>("fragments is {}, but must be from 1 to the {} steps of a round", options.fragments,
                                 options.every);
  }
  const std::int64_t gap = options.every / options.fragments;
  if (options.delay < 0 || options.delay > gap) {
    base::fail<base::UsageError>(
        "delay is {}, but must be from 0 to the {} steps between two exchanges ({} steps of a round, {} fragment{})",
        options.delay, gap, options.every, options.fragments, options.fragments == 1 ? "" : "s");
  }
}

Schedule round_operations(const RoundOptions& options, std::int64_t step) {
  const auto begins = [&](std::int64_t s) {
    const std::int64_t since_start = s - options.start_step;
    return since_start < 1 ? -1 : fragment_at(options, (since_start - 1) % options.every + 1);
  };
  Schedule operations;
  // What is under way is applied before the next one begins.
  const auto add = [&](OpKind kind, int fragment) { operations.push_back({.kind = kind, .fragment = fragment}); };
  if (const int f = begins(step - options.delay); options.delay > 0 && f >= 0) add(OpKind::apply, f);
  if (const int f = begins(step); f >= 0) {
    add(OpKind::exchange, f);
    if (options.delay == 0) add(OpKind::apply, f);
  }
  return operations;
}

Schedule round_schedule(const ModelPlan& plan, const ScheduleOptions& options, const RoundOptions& rounds) {
  const Schedule one = step_schedule(plan, options);
  Schedule schedule;
  // The second one: the first has no past.
  for (std::int64_t i = rounds.every + 1; i <= 2 * rounds.every; ++i) {
    schedule.insert(schedule.end(), one.begin(), one.end());
    const Schedule operations = round_operations(rounds, rounds.start_step + i);
    schedule.insert(schedule.end(), operations.begin(), operations.end());
  }
  return schedule;
}

std::int64_t exchanges_of(const RoundOptions& options, int fragment, std::int64_t steps) {
  const std::int64_t since_first = steps - options.start_step - begin_of(options, fragment);
  return since_first < 0 ? 0 : since_first / options.every + 1;
}

std::vector<ModelPlan> fragment_plans(const ModelPlan& plan, int fragments) {
  std::vector<ModelPlan> plans(static_cast<std::size_t>(fragments), plan);
  int exchanged = 0;
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    if (!plan.units[u].is_exchanged()) continue;
    for (int f = 0; f < fragments; ++f) {
      plans[static_cast<std::size_t>(f)].units[u].group_local = f != exchanged % fragments;
    }
    ++exchanged;
  }
  if (exchanged < fragments) {
    base::fail<base::UsageError>("fragments is {}, but the model has just {} units to exchange", fragments, exchanged);
  }
  return plans;
}

}  // namespace fedshard::plan
