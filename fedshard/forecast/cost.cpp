#include "fedshard/forecast/cost.h"

#include <fmt/ranges.h>

#include <cstdio>
#include <filesystem>
#include <numeric>
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

// "4,2,2" as TOML's list, anything else as it is.
std::string one_or_list(const std::string& text) {
  return text.find(',') == std::string::npos || text.starts_with('[') ? text : "[" + text + "]";
}

// The dtype whose elements are so large.
std::string dtype_of(const char* flag, const std::string& bytes) {
  if (bytes == "2") return "bf16";
  if (bytes == "4") return "fp32";
  fail<UsageError>("{} {}: elements are of 2 bytes (bf16) or 4 (fp32)", flag, bytes);
}

std::string model_setting(const std::string& model) {
  const std::filesystem::path path(model);
  if (std::filesystem::is_directory(path)) return "model.hf=" + model;
  if (std::filesystem::is_regular_file(path)) {
    if (path.filename() != "config.json") {
      fail<UsageError>("--model {}: a file must be named config.json, as Hugging Face has it", model);
    }
    return "model.hf=" + (path.has_parent_path() ? path.parent_path().string() : ".");
  }
  return "model.preset=" + model;
}

// The flags as settings, and what the user set after them, so that the latter win.
std::vector<std::string> settings_of(const CostArgs& args) {
  std::vector<std::string> settings;
  const auto set = [&](const char* key, const std::optional<std::string>& value) {
    if (value) settings.push_back(fmt::format("{}={}", key, *value));
  };
  const auto set_list = [&](const char* key, const std::optional<std::string>& value) {
    if (value) set(key, one_or_list(*value));
  };
  const auto set_dtype = [&](const char* key, const char* flag, const std::optional<std::string>& value) {
    if (value) set(key, dtype_of(flag, *value));
  };
  const auto set_bool = [&](const char* key, const std::optional<bool>& value) {
    if (value) set(key, *value ? "true" : "false");
  };
  if (!args.model.empty()) settings.push_back(model_setting(args.model));
  set_list("parallelism.groups", args.groups);
  set_list("parallelism.data_parallel_shard_degree", args.shard);
  if (args.shard) set("parallelism.data_parallel_replicate_degree", "-1");
  set_list("federation.every", args.every);
  set("federation.scheme", args.scheme);
  set("federation.compress", args.compress);
  set("training.gradient_accumulation_steps", args.accum);
  set("training.local_batch_size", args.batch);
  set("training.seq_len", args.seq);
  set_dtype("training.dtype", "--bytes-gather", args.bytes_gather);
  set_dtype("training.reduce_dtype", "--bytes-reduce", args.bytes_reduce);
  set_dtype("training.master_dtype", "--bytes-aggregate", args.bytes_aggregate);
  set_bool("parallelism.fsdp_reshard_after_forward", args.reshard);
  set_bool("training.reduce_each_micro_step", args.reduce_each_micro_step);
  settings.insert(settings.end(), args.settings.begin(), args.settings.end());
  return settings;
}

config::Config config_of(const CostArgs& args) {
  const std::vector<std::string> settings = settings_of(args);
  if (!args.config.empty()) return config::load_config(args.config, settings);
  config::Config config = config::config_of(settings);
  // A list of steps asks that a run ends with a round; no run is meant here.
  if (config.federation.every.by == plan::Pace::By::group_steps) {
    config.training.steps = config.federation.start_step + plan::most_steps(config.federation.every);
  }
  return config;
}

int world_of(const CostArgs& args, const config::Config& config) {
  if (args.ranks) return *args.ranks;
  const auto* sizes = std::get_if<std::vector<int>>(&config.parallelism.groups);
  if (sizes == nullptr) fail<UsageError>("--ranks is missing: how many ranks are there?");
  const std::int64_t sum = std::accumulate(sizes->begin(), sizes->end(), std::int64_t{0});
  constexpr std::int64_t kMost = 1 << 20;
  if (sum < 1 || sum > kMost)
    fail<UsageError>("groups of {} are {} ranks; it must be 1 to {}", fmt::join(*sizes, ", "), sum, kMost);
  return static_cast<int>(sum);
}

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
  const int models = !args.config.empty() + !args.model.empty() + !args.units.empty();
  if (models == 0) fail<UsageError>("cost of what? Give a config file, --model or --units");
  if (!args.units.empty() && models > 1) {
    fail<UsageError>("--units stands for a model; leave {} out", args.config.empty() ? "--model" : "the config file");
  }
  if (args.nodes_per_cell > 0 && args.ranks_per_node == 0) {
    fail<UsageError>("--nodes-per-cell {}: give --ranks-per-node too", args.nodes_per_cell);
  }
}

}  // namespace

int cost(const CostArgs& args) {
  check(args);
  const config::Config config = config_of(args);
  const int world = world_of(args, config);
  const bool has_model = args.units.empty();
  const topology::Layout layout =
      has_model ? config::validate_without_data(config, world) : config::validate_layout(config, world);
  const cost::Setting setting = setting_of(args, config, layout);
  const cost::Summary summary = cost::summarize(setting);
  CostReport report{setting, summary, {}, {}};
  if (has_model) report.memory = memory(config, layout);
  if (!args.config.empty()) report.run = run_bytes(config, layout);
  fmt::print("{}", args.json ? json_of(report) : text_of(report));
  return 0;
}

}  // namespace fedshard::forecast
