#include "fedshard/forecast/forecast.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <sstream>
#include <utility>

#include "fedshard/base/quantities.h"
#include "fedshard/config/options.h"
#include "fedshard/cost/formulas.h"
#include "fedshard/model/activations.h"

namespace fedshard::forecast {
namespace {

constexpr std::int64_t kFp32Bytes = 4;

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

std::int64_t exchange_bytes(const config::Config& config, const plan::ModelPlan& plan, const topology::Layout& layout,
                            int group) {
  const plan::Compression compression = config::compression_of(config.federation);
  const plan::RoundOptions rounds = config::round_options(config.federation);
  const topology::ExchangeRules rules = config::exchange_rules(config.federation);
  const std::int64_t master = config::bytes_of(config.training.master_dtype);
  const std::int64_t whole = plan::exchange_numel(plan, layout, group, {.rules = rules});
  std::int64_t most = rounds.start_step > 0 ? whole * kFp32Bytes : 0;
  const bool delayed = rounds.delay > 0, compressed = compression.kind != plan::Compression::Kind::none;
  const bool keeps_anchor =
      plan::needs_anchor(config::outer_options(config.federation)) || config.federation.measures || compressed;
  for (const plan::ModelPlan& fragment : plan::fragment_plans(plan, rounds.fragments)) {
    most = std::max(most, compressed
                              ? plan::compressed_exchange_bytes(fragment, layout, group, compression, delayed, rules)
                              : plan::exchange_numel(fragment, layout, group, {keeps_anchor, delayed, rules}) * master);
  }
  if (config.federation.inner_state != config::InnerState::average) return most;
  // What the moments' mean leads to is kept until the commit, and they are fp32. An upper bound.
  return plan::moment_bytes(plan, plan::update_rules(plan, config::update_options(config.optimizer)),
                            layout.group(group).shards) +
         std::max(most, whole * kFp32Bytes);
}

// Of all steps of all groups, without what the warm-up sends beside them. Nothing where only the run will show how many
// each group makes.
std::optional<cost::Bytes> bytes_of_steps(const config::Config& config, const plan::ModelPlan& plan,
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
cost::Bytes bytes_of_rounds(const config::Config& config, const plan::ModelPlan& plan, const topology::Layout& layout,
                            const cost::TrafficOptions& options) {
  const plan::RoundOptions rounds = config::round_options(config.federation);
  cost::Bytes bytes;
  int f = 0;
  for (const plan::ModelPlan& fragment : plan::fragment_plans(plan, rounds.fragments)) {
    bytes += cost::round_bytes(fragment, layout, options) * plan::exchanges_of(rounds, f++, config.training.steps);
  }
  return bytes;
}

}  // namespace

plan::MemoryTable memory(const config::Config& config, const topology::Layout& layout) {
  const model::Dims dims = config::dims_of(config.model);
  const plan::ModelPlan plan = config::plan_of(config, dims);
  plan::MemoryOptions options;
  const bool federated = layout.groups() > 1;
  options.evaluates_mean = federated && !config.data.eval.empty();
  options.delayed = federated && config.federation.delay > 0;
  options.proximal = federated && config.federation.prox_mu > 0;
  options.master_bytes = config::bytes_of(config.training.master_dtype);
  options.compute_bytes = config::bytes_of(config.training.dtype);
  options.reduce_bytes = config::bytes_of(config.training.reduce_dtype);
  options.updates = config::update_options(config.optimizer);
  options.gpu = config.comm.backend == config::BackendChoice::nccl;
  options.offload = config.optimizer.offload;
  const model::MicroStepShape micro_step = config::micro_step_shape(config, plan);
  options.activations = model::llama_stage_activations(dims, micro_step);
  options.shared_activation_bytes = model::rotary_table_bytes(dims, micro_step);
  options.schedule = config::schedule_options(config);
  std::optional<plan::MemoryTable> largest;
  for (int group = 0; group < layout.groups(); ++group) {
    const topology::GroupShape& shape = layout.group(group);
    options.shards = shape.shards;
    options.replicas = shape.replicas;
    options.exchange_bytes = federated ? exchange_bytes(config, plan, layout, group) : 0;
    if (options.evaluates_mean) {
      options.mean_exchange_bytes =
          plan::exchange_numel(plan, layout, group, {.rules = config::exchange_rules(config.federation)}) *
          options.master_bytes;
    }
    options.outer_numel = federated
                              ? plan::outer_numel(plan, layout, group, config::outer_options(config.federation),
                                                  config::compression_of(config.federation), config.federation.measures,
                                                  config::exchange_rules(config.federation))
                              : 0;
    plan::MemoryTable table = plan::predict_memory(plan, options);
    if (!largest || table.peak > largest->peak) largest = std::move(table);
    if (layout.equal_groups()) break;
  }
  return *largest;
}

std::optional<cost::Bytes> run_bytes(const config::Config& config, const topology::Layout& layout) {
  const plan::ModelPlan plan = config::plan_of(config, config::dims_of(config.model));
  const cost::TrafficOptions options = config::traffic_options(config);
  const std::int64_t start = config.federation.start_step;
  std::optional<cost::Bytes> all = bytes_of_steps(config, plan, layout, options);
  if (!all || layout.groups() == 1) return all;
  if (start > 0) {
    *all += cost::synchronous_bytes(plan, layout, options.exchange) * start +
            cost::warm_up_end_bytes(plan, layout, options);
  }
  return *all + bytes_of_rounds(config, plan, layout, options);
}

std::string traffic(const config::Config& config, const topology::Layout& layout) {
  const plan::ModelPlan plan = config::plan_of(config, config::dims_of(config.model));
  const cost::TrafficOptions options = config::traffic_options(config);
  const cost::Bytes step = cost::step_bytes(plan, layout, options);
  const cost::Bytes sum = cost::synchronous_bytes(plan, layout, options.exchange);
  const cost::Bytes round = cost::round_bytes(plan, layout, options);
  const bool federated = layout.groups() > 1;
  const std::int64_t steps = config.training.steps, start = config.federation.start_step;
  std::string text = traffic_line("a step", step, layout.world());
  if (federated && start > 0) {
    text += traffic_line("a step of the warm-up", step + sum, layout.world());
  }
  if (federated) text += traffic_line("the end of a round", round, layout.world());
  if (const auto all = run_bytes(config, layout)) {
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
      plain.average_moments = false;
      text += traffic_line("a mean to evaluate", cost::round_bytes(plan, layout, plain), layout.world());
    }
  }
  return text;
}

void print_dry_run(const config::Config& config, const topology::Layout& layout) {
  const plan::ModelPlan plan = config::plan_of(config, config::dims_of(config.model));
  fmt::print(
      "{}\n# Layout\n# {}\n# {} parameters in {} units\n\n# Memory of a rank\n{}\n# Bytes on the wire, all ranks\n{}",
      config::resolved_toml(config), layout.describe(), plan.numel(), plan.units.size(),
      as_comment(plan::describe(memory(config, layout))), as_comment(traffic(config, layout)));
}

}  // namespace fedshard::forecast
