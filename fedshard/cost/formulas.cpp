#include "fedshard/cost/formulas.h"

#include <vector>

#include "fedshard/topology/ranges.h"

namespace fedshard::cost {
namespace {

// The exchange of all elements that train, with one group nothing. `sent`: bytes of the model between groups, as often
// as it goes there (copies_of).
Bytes exchange_bytes(const topology::Layout& layout, topology::Scheme scheme, std::int64_t model, std::int64_t sent) {
  Bytes bytes;
  if (layout.groups() == 1) return bytes;
  bytes.aggregate_between = 2 * (layout.groups() - 1) * sent;
  if (scheme == topology::Scheme::naive) return bytes;
  for (const topology::GroupShape& group : layout.shapes()) bytes.aggregate_inside += (group.replicas - 1) * model;
  return bytes;
}

// How often a group's replicas bring the model.
std::int64_t copies_of(const topology::Layout& layout, topology::Scheme scheme) {
  return scheme == topology::Scheme::naive ? layout.group(0).replicas : 1;
}

Bytes plain_exchange_bytes(const topology::Layout& layout, topology::Scheme scheme, std::int64_t model) {
  return exchange_bytes(layout, scheme, model, copies_of(layout, scheme) * model);
}

// Of all parts that are exchanged, each once.
std::int64_t encoded_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options) {
  const std::vector<std::int64_t> unit_numel = plan.exchanged_numel_by_unit();
  std::int64_t bytes = 0;
  for (int rank = 0; rank < layout.world(); ++rank) {
    for (const topology::ExchangePart& part : topology::exchange_parts(layout, unit_numel, rank, options.exchange)) {
      if (part.owner == layout.group_of(rank)) bytes += plan::encoded_bytes(options.compression, part.range.size());
    }
  }
  return bytes;
}

}  // namespace

Bytes& Bytes::operator+=(const Bytes& more) {
  gather += more.gather;
  reduce += more.reduce;
  replica += more.replica;
  aggregate_inside += more.aggregate_inside;
  aggregate_between += more.aggregate_between;
  return *this;
}

Bytes operator+(Bytes a, const Bytes& b) { return a += b; }

Bytes operator*(Bytes once, std::int64_t times) {
  return {once.gather * times, once.reduce * times, once.replica * times, once.aggregate_inside * times,
          once.aggregate_between * times};
}

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

Bytes group_step_bytes(const plan::ModelPlan& plan, const topology::GroupShape& group, const TrafficOptions& options) {
  const std::int64_t shards = group.shards, replicas = group.replicas;
  const int micro_steps = options.schedule.micro_steps;
  const int reductions = options.schedule.reduce_each_micro_step ? micro_steps : 1;
  Bytes bytes;
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    const std::int64_t shard_numel = plan.units[u].shard_numel(shards);
    const std::int64_t moved = group.ranks * (shards - 1) * shard_numel;
    const int gathers = gathers_of(plan, u, options.schedule.reshard_after_forward);
    bytes.gather += micro_steps * gathers * moved * options.bytes_gather;
    if (plan.units[u].frozen) continue;
    bytes.reduce += reductions * moved * options.bytes_reduce;
    bytes.replica += reductions * 2 * (replicas - 1) * shards * shard_numel * options.bytes_reduce;
  }
  bytes.gather += replicas * plan::update_bytes(plan, plan::update_rules(plan, options.updates), shards);
  return bytes;
}

Bytes step_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options) {
  Bytes bytes;
  for (const topology::GroupShape& group : layout.shapes()) bytes += group_step_bytes(plan, group, options);
  return bytes;
}

Bytes round_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options) {
  const std::int64_t model = plan.exchanged_numel() * options.bytes_aggregate;
  const topology::Scheme scheme = options.exchange.scheme;
  Bytes bytes;
  if (options.average_moments) {
    const plan::UpdateRules rules = plan::update_rules(plan, options.updates);
    bytes = plain_exchange_bytes(layout, scheme, plan::exchanged_moments(plan, rules) * 4);
  }
  if (options.compression.kind == plan::Compression::Kind::none) {
    return bytes + plain_exchange_bytes(layout, scheme, model);
  }
  return bytes + exchange_bytes(layout, scheme, model, encoded_bytes(plan, layout, options));
}

Bytes synchronous_bytes(const plan::ModelPlan& plan, const topology::Layout& layout,
                        const topology::ExchangeRules& rules) {
  return plain_exchange_bytes(layout, rules.scheme, plan.exchanged_numel() * 4);
}

Bytes warm_up_end_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options) {
  return plain_exchange_bytes(layout, options.exchange.scheme, plan.exchanged_numel() * options.bytes_aggregate);
}

Bytes forward_bytes(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options) {
  Bytes bytes;
  for (const topology::GroupShape& group : layout.shapes()) {
    for (const plan::UnitSpec& unit : plan.units) {
      bytes.gather += group.ranks * (group.shards - 1) * unit.shard_numel(group.shards) * options.bytes_gather;
    }
  }
  return bytes;
}

}  // namespace fedshard::cost
