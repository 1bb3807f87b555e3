#include "fedshard/cost/summary.h"

#include <algorithm>

#include "fedshard/base/error.h"
#include "fedshard/plan/rounds.h"

namespace fedshard::cost {
namespace {

constexpr std::int64_t kFp32Bytes = 4;

std::vector<int> view_of(const Setting& setting) {
  const int world = setting.layout.world(), size = setting.view_group;
  if (size < 0 || size > world) {
    base::fail<base::UsageError>("--view-group {}: {} ranks are seen in groups of 1 to {}", size, world, world);
  }
  std::vector<int> groups;
  for (int rank = 0; rank < world; ++rank) groups.push_back(size > 0 ? rank / size : setting.layout.group_of(rank));
  return groups;
}

std::int64_t lower_bound_of(const Setting& setting, std::int64_t groups) {
  std::int64_t bytes = 0;
  for (std::size_t u = 0; u < setting.plan.units.size(); ++u) {
    bytes += setting.plan.units[u].numel() *
             (setting.uses.gathers[u] * setting.traffic.bytes_gather + setting.uses.update_gathers[u] * kFp32Bytes +
              setting.uses.reductions[u] * setting.traffic.bytes_reduce);
  }
  return (groups - 1) * bytes;
}

// Of a group in a round, where it is known beforehand. All groups but those that a list gives steps of their own take
// as many sequences a step and rank, so tokens say how many steps there are.
std::optional<std::int64_t> steps_of(const Setting& setting, int group) {
  const plan::Pace& pace = setting.pace;
  if (pace.by == plan::Pace::By::steps) return pace.count;
  if (pace.by == plan::Pace::By::group_steps) return pace.by_group[static_cast<std::size_t>(group)];
  if (pace.by == plan::Pace::By::seconds) return std::nullopt;
  const std::int64_t tokens =
      setting.layout.group(group).ranks * setting.local_batch_size * setting.micro_steps * setting.seq_len;
  return (pace.count - 1) / tokens + 1;
}

void add_batches(const Setting& setting, Summary& summary) {
  summary.round_sequences = 0;
  summary.steps = 0;
  for (int group = 0; group < setting.layout.groups(); ++group) {
    const std::int64_t update = setting.layout.group(group).ranks * setting.local_batch_size * setting.micro_steps;
    summary.sequences.push_back(update);
    const std::optional<std::int64_t> steps = steps_of(setting, group);
    if (!steps) {
      summary.steps.reset();
      summary.round_sequences.reset();
      continue;
    }
    if (!summary.steps) continue;
    summary.steps = std::max(*summary.steps, *steps);
    *summary.round_sequences += update * *steps;
  }
}

}  // namespace

std::optional<Fraction> Summary::aggregate_per_step() const {
  if (!steps) return std::nullopt;
  return Fraction(round.most_of_a_rank(), *steps);
}

std::optional<Fraction> Summary::crossing_per_step() const {
  if (!steps) return std::nullopt;
  return Fraction(step.between_groups()) + Fraction(round.between_groups(), *steps);
}

std::optional<Fraction> Summary::ratio_to_flat() const {
  const std::optional<Fraction> own = crossing_per_step();
  if (!own || flat.between_groups() == 0) return std::nullopt;
  return *own / Fraction(flat.between_groups());
}

Summary summarize(const Setting& setting) {
  const std::vector<int> view = view_of(setting);
  const Tally empty(setting.placement, view);
  Summary summary{.step = empty, .round = empty, .flat = empty, .steps = {}, .sequences = {}, .round_sequences = {}};
  step_flows(setting.plan, setting.layout, setting.traffic, setting.uses, setting.algorithm, summary.step.sink());
  if (setting.layout.groups() > 1) {
    for (const plan::ModelPlan& fragment : plan::fragment_plans(setting.plan, setting.fragments)) {
      round_flows(fragment, setting.layout, setting.traffic, summary.round.sink());
    }
  }
  const topology::Layout flat = topology::Layout::make(setting.layout.world(), {});
  // A world that doubling cannot pair is a ring in any case.
  const bool pairs = (flat.world() & (flat.world() - 1)) == 0;
  step_flows(setting.plan, flat, setting.traffic, setting.uses, pairs ? setting.algorithm : Algorithm::ring,
             summary.flat.sink());
  for (const topology::GroupShape& group : setting.layout.shapes()) {
    summary.collectives = std::max(summary.collectives, collectives_of(setting.uses, group));
  }
  summary.flat_lower_bound = lower_bound_of(setting, *std::max_element(view.begin(), view.end()) + 1);
  add_batches(setting, summary);
  return summary;
}

}  // namespace fedshard::cost
