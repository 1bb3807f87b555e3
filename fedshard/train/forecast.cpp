#include "fedshard/train/forecast.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <sstream>
#include <utility>

#include "fedshard/base/quantities.h"
#include "fedshard/cost/formulas.h"
#include "fedshard/model/activations.h"
#include "fedshard/train/options.h"

namespace fedshard::train {
namespace {

int bytes_of(at::ScalarType dtype) { return static_cast<int>(c10::elementSize(dtype)); }

std::string traffic_line(const char* what, const cost::Bytes& bytes, int world) {
  const auto human = [](std::int64_t count) { return base::human(base::Bytes{count}); };
  return fmt::format(
      "{:<22}{:>12} in groups ({} gather, {} reduce, {} replica, {} aggregate), {} between groups; {} a rank\n", what,
      human(bytes.inside()), human(bytes.gather), human(bytes.reduce), human(bytes.replica),
      human(bytes.aggregate_inside), human(bytes.between()), human((bytes.inside() + bytes.between()) / world));
}

std::string as_comment(const std::string& text) {
  std::istringstream in(text);
  std::string line, out;
  while (std::getline(in, line)) out += "# " + line + "\n";
  return out;
}

std::int64_t exchange_bytes(const Config& config, const plan::ModelPlan& plan, const topology::Layout& layout,
                            int group) {
  const plan::Compression compression = compression_of(config.federation);
  const plan::RoundOptions rounds = round_options(config.federation);
  const topology::ExchangeRules rules = exchange_rules(config.federation);
  const std::int64_t master = bytes_of(engine_options(config).dtypes.master);
  const std::int64_t whole = plan::exchange_numel(plan, layout, group, {.rules = rules});
  std::int64_t most = rounds.start_step > 0 ? whole * bytes_of(at::kFloat) : 0;
  const bool delayed = rounds.delay > 0, compressed = compression.kind != plan::Compression::Kind::none;
  const bool keeps_anchor =
      plan::needs_anchor(outer_options(config.federation)) || config.federation.measures || compressed;
  for (const plan::ModelPlan& fragment : plan::fragment_plans(plan, rounds.fragments)) {
    most = std::max(most, compressed
                              ? plan::compressed_exchange_bytes(fragment, layout, group, compression, delayed, rules)
                              : plan::exchange_numel(fragment, layout, group, {keeps_anchor, delayed, rules}) * master);
  }
  if (config.federation.inner_state != InnerState::average) return most;
  // What the moments' mean leads to is kept until the commit, and they are fp32. An upper bound.
  return plan::moment_bytes(plan, plan::update_rules(plan, update_options(config.optimizer)),
                            layout.group(group).shards) +
         std::max(most, whole * bytes_of(at::kFloat));
}

// Of all steps of all groups, without what the warm-up sends beside them. Nothing where only the run will show how many
// each group makes.
std::optional<cost::Bytes> bytes_of_steps(const Config& config, const plan::ModelPlan& plan,
                                          const topology::Layout& layout, const cost::TrafficOptions& options) {
  const plan::Pace& pace = config.federation.every;
  const std::int64_t steps = config.training.steps, start = config.federation.start_step;
  if (layout.groups() == 1 || pace.is_even()) return cost::step_bytes(plan, layout, options) * steps;
  if (pace.by != plan::Pace::By::group_steps) return std::nullopt;
  const std::int64_t rounds = (steps - start) / plan::most_steps(pace);
  cost::Bytes bytes;
  for (int group = 0; group < layout.groups(); ++group) {
    const std::int64_t own = start + rounds * pace.by_group[static_cast<std::size_t>(group)];
    bytes += cost::group_step_bytes(plan, layout.group(group), options) * own;
  }
  return bytes;
}

// At the ends of all rounds of a run, of which the last may lack some fragments.
cost::Bytes bytes_of_rounds(const Config& config, const plan::ModelPlan& plan, const topology::Layout& layout,
                            const cost::TrafficOptions& options) {
  const plan::RoundOptions rounds = round_options(config.federation);
  cost::Bytes bytes;
  int f = 0;
  for (const plan::ModelPlan& fragment : plan::fragment_plans(plan, rounds.fragments)) {
    bytes += cost::round_bytes(fragment, layout, options) * plan::exchanges_of(rounds, f++, config.training.steps);
  }
  return bytes;
}

}  // namespace

plan::MemoryTable forecast_memory(const Config& config, const topology::Layout& layout) {
  const model::Dims dims = dims_of(config.model);
  const plan::ModelPlan plan = plan_of(config, dims);
  const shard::EngineOptions engine = engine_options(config);
  plan::MemoryOptions options;
  const bool federated = layout.groups() > 1;
  options.evaluates_mean = federated && !config.data.eval.empty();
  options.delayed = federated && config.federation.delay > 0;
  options.proximal = federated && config.federation.prox_mu > 0;
  options.master_bytes = bytes_of(engine.dtypes.master);
  options.compute_bytes = bytes_of(engine.dtypes.compute);
  options.reduce_bytes = bytes_of(engine.dtypes.reduce);
  options.updates = update_options(config.optimizer);
  options.gpu = config.comm.backend == BackendChoice::nccl;
  options.offload = config.optimizer.offload;
  const model::MicroStepShape micro_step = micro_step_shape(config, plan);
  options.activations = model::llama_stage_activations(dims, micro_step);
  options.shared_activation_bytes = model::rotary_table_bytes(dims, micro_step);
  options.schedule = engine.schedule;
  std::optional<plan::MemoryTable> largest;
  for (int group = 0; group < layout.groups(); ++group) {
    const topology::GroupShape& shape = layout.group(group);
    options.shards = shape.shards;
    options.replicas = shape.replicas;
    options.exchange_bytes = federated ? exchange_bytes(config, plan, layout, group) : 0;
    if (options.evaluates_mean) {
      options.mean_exchange_bytes =
          plan::exchange_numel(plan, layout, group, {.rules = exchange_rules(config.federation)}) *
          options.master_bytes;
    }
    options.outer_numel = federated ? plan::outer_numel(plan, layout, group, outer_options(config.federation),
                                                        compression_of(config.federation), config.federation.measures,
                                                        exchange_rules(config.federation))
                                    : 0;
    plan::MemoryTable table = plan::predict_memory(plan, options);
    if (!largest || table.peak > largest->peak) largest = std::move(table);
    if (layout.equal_groups()) break;
  }
  return *largest;
}

std::string forecast_traffic(const Config& config, const topology::Layout& layout) {
  const plan::ModelPlan plan = plan_of(config, dims_of(config.model));
  const shard::EngineOptions engine = engine_options(config);
  const cost::TrafficOptions options{engine.schedule,
                                     bytes_of(engine.dtypes.compute),
                                     bytes_of(engine.dtypes.reduce),
                                     bytes_of(engine.dtypes.master),
                                     update_options(config.optimizer),
                                     compression_of(config.federation),
                                     exchange_rules(config.federation),
                                     config.federation.inner_state == InnerState::average};
  const cost::Bytes step = cost::step_bytes(plan, layout, options);
  const cost::Bytes sum = cost::synchronous_bytes(plan, layout, options.exchange);
  const cost::Bytes round = cost::round_bytes(plan, layout, options);
  const bool federated = layout.groups() > 1;
  const std::int64_t steps = config.training.steps, start = config.federation.start_step;
  std::optional<cost::Bytes> all = bytes_of_steps(config, plan, layout, options);
  std::string text = traffic_line("a step", step, layout.world());
  if (federated && start > 0) {
    text += traffic_line("a step of the warm-up", step + sum, layout.world());
    if (all) *all += sum * start + cost::warm_up_end_bytes(plan, layout, options);
  }
  if (federated) {
    text += traffic_line("the end of a round", round, layout.world());
    if (all) *all += bytes_of_rounds(config, plan, layout, options);
  }
  if (all) {
    text += traffic_line(fmt::format("{} steps", steps).c_str(), *all, layout.world());
  } else {
    text += fmt::format("Rounds of {}: how many there are, and how many steps each group makes, only the run shows\n",
                        plan::describe(config.federation.every));
  }
  if (!config.data.eval.empty()) {
    text += traffic_line("a batch of evaluation", cost::forward_bytes(plan, layout, options), layout.world());
    if (federated) {  // between rounds: parameters as they are, whatever a round does
      cost::TrafficOptions plain = options;
      plain.compression = {};
      text += traffic_line("a mean to evaluate", cost::round_bytes(plan, layout, plain), layout.world());
    }
  }
  return text;
}

void print_dry_run(const Config& config, const topology::Layout& layout) {
  const plan::ModelPlan plan = plan_of(config, dims_of(config.model));
  fmt::print(
      "{}\n# Layout\n# {}\n# {} parameters in {} units\n\n# Memory of a rank\n{}\n# Bytes on the wire, all ranks\n{}",
      resolved_toml(config), layout.describe(), plan.numel(), plan.units.size(),
      as_comment(plan::describe(forecast_memory(config, layout))), as_comment(forecast_traffic(config, layout)));
}

}  // namespace fedshard::train
