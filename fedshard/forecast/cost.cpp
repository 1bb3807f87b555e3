#include "fedshard/forecast/cost.h"

#include <fmt/format.h>

#include <cstdio>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/config/options.h"
#include "fedshard/forecast/cost_report.h"
#include "fedshard/forecast/forecast.h"
#include "fedshard/model/dims.h"

namespace fedshard::forecast {
namespace {

using base::fail;
using base::UsageError;

// How often units are gathered where the question is not about the engine's own schedule.
void gather_as_asked(const CostArgs& args, cost::Setting& setting) {
  if (!args.keep_root) return;
  const bool root = *args.keep_root;
  if (root && args.units.empty()) return;  // the program keeps it
  const plan::ScheduleOptions& schedule = setting.traffic.schedule;
  const std::int64_t once = schedule.micro_steps, kept = schedule.reshard_after_forward ? 2 * once : once;
  for (std::size_t u = 0; u < setting.uses.gathers.size(); ++u) {
    setting.uses.gathers[u] = root && u == 0 ? once : kept;
  }
}

cost::Setting setting_of(const CostArgs& args, const config::Config& config, topology::Layout layout) {
  const auto& training = config.training;
  plan::ModelPlan plan =
      args.units.empty() ? config::plan_of(config, config::dims_of(config.model)) : plan::plan_of_units(args.units);
  const cost::TrafficOptions traffic = config::traffic_options(config);
  cost::UnitUses uses = cost::uses_of(plan, traffic);
  cost::Setting setting{.plan = std::move(plan),
                        .layout = std::move(layout),
                        .traffic = traffic,
                        .uses = std::move(uses),
                        .algorithm = args.algorithm == "recursive" ? cost::Algorithm::recursive : cost::Algorithm::ring,
                        .placement = {args.ranks_per_node, args.nodes_per_cell},
                        .view_group = args.view_group,
                        .pace = config.federation.every,
                        .fragments = static_cast<int>(config.federation.fragments),
                        .local_batch_size = training.local_batch_size,
                        .micro_steps = training.gradient_accumulation_steps,
                        .seq_len = training.seq_len};
  gather_as_asked(args, setting);
  return setting;
}

void check(const CostArgs& args) {
  const int models = !args.question.config.empty() + !args.question.model.empty() + !args.units.empty();
  if (models == 0) fail<UsageError>("cost of what? Give a config file, --model or --units");
  if (!args.units.empty() && models > 1) {
    fail<UsageError>("--units stands for a model; leave {} out",
                     args.question.config.empty() ? "--model" : "the config file");
  }
  if (args.nodes_per_cell > 0 && args.ranks_per_node == 0) {
    fail<UsageError>("--nodes-per-cell {}: give --ranks-per-node too", args.nodes_per_cell);
  }
}

}  // namespace

int cost(const CostArgs& args) {
  check(args);
  const config::Config config = config_of(args.question);
  const int world = world_of(config, args.ranks);
  const bool has_model = args.units.empty();
  const topology::Layout layout =
      has_model ? config::validate_without_data(config, world) : config::validate_layout(config, world);
  const cost::Setting setting = setting_of(args, config, layout);
  const cost::Summary summary = cost::summarize(setting);
  CostReport report{setting, summary, {}, {}};
  if (has_model) report.memory = memory(config, layout);
  if (!args.question.config.empty()) report.run = run_bytes(config, layout);
  fmt::print("{}", args.json ? json_of(report) : text_of(report));
  return 0;
}

}  // namespace fedshard::forecast
