#include "fedshard/cost/formulas.h"

namespace fedshard::cost {

int gathers_of(const plan::ModelPlan& plan, int unit, bool reshard_after_forward) {
  if (!reshard_after_forward || plan.stages_of(unit) > 1) return 1;
  const int last = static_cast<int>(plan.stages.size()) - 1;
  for (int s = plan.first_trained_stage(); s < last; ++s) {
    if (plan.stages[s].uses(unit)) return plan.stages[s].backward_reads_parameters ? 2 : 1;
  }
  // The last stage's backward follows its forward at once, so the unit is still there; before the first stage that
  // trains there is no backward.
  return 1;
}

Bytes step_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options) {
  layout.require_equal_groups();
  const topology::GroupShape& shape = layout.group(0);
  const std::int64_t ranks = layout.world(), shards = shape.shards, replicas = shape.replicas;
  Bytes bytes;
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    const std::int64_t shard_numel = plan.units[u].shard_numel(shards);
    const std::int64_t moved = ranks * (shards - 1) * shard_numel;
    bytes.gather += moved * gathers_of(plan, u, options.schedule.reshard_after_forward) * options.bytes_gather;
    if (plan.units[u].frozen) continue;
    bytes.reduce += moved * options.bytes_reduce;
    bytes.replica += 2 * (replicas - 1) * (ranks / replicas) * shard_numel * options.bytes_reduce;
  }
  bytes.gather *= options.schedule.micro_steps;
  const int reductions = options.schedule.reduce_each_micro_step ? options.schedule.micro_steps : 1;
  bytes.reduce *= reductions;
  bytes.replica *= reductions;
  const plan::UpdateRules rules = plan::update_rules(plan, options.updates);
  bytes.gather += layout.groups() * replicas * plan::update_bytes(plan, rules, shards);
  return bytes;
}

Bytes round_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options) {
  layout.require_equal_groups();
  const std::int64_t groups = layout.groups(), replicas = layout.group(0).replicas;
  Bytes bytes;
  if (groups == 1) return bytes;
  bytes.aggregate_between = 2 * (groups - 1) * plan.trained_numel() * options.bytes_aggregate;
  bytes.aggregate_inside = groups * (replicas - 1) * plan.trained_numel() * options.bytes_aggregate;
  return bytes;
}

Bytes forward_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options) {
  layout.require_equal_groups();
  const std::int64_t shards = layout.group(0).shards;
  Bytes bytes;
  for (const plan::UnitSpec& unit : plan.units) {
    bytes.gather += layout.world() * (shards - 1) * unit.shard_numel(shards) * options.bytes_gather;
  }
  return bytes;
}

}  // namespace fedshard::cost
