// What must hold between keys, and between them and the world.
#include "fedshard/base/error.h"
#include "fedshard/train/config.h"

namespace fedshard::train {
namespace {

using base::fail;
using base::UsageError;

void check_model_and_data(const Config& config) {
  const auto& model = config.model;
  if (model.preset.empty() && model.hf.empty()) {
    fail<UsageError>("[model] needs preset or hf: which model is trained?");
  }
  if (!model.preset.empty() && !model.hf.empty()) {
    fail<UsageError>("[model] has both preset = \"{}\" and hf = \"{}\"; give one of them", model.preset, model.hf);
  }
  if (config.data.train.empty()) fail<UsageError>("[data] train is missing: what is trained on?");
  if (config.data.eval.empty() && (config.validation.interval > 0 || config.validation.steps > 0)) {
    fail<UsageError>("[validation] is set, but [data] eval is missing: what is evaluated on?");
  }
}

void check_schedule(const Config& config) {
  const auto& schedule = config.lr_scheduler;
  if (schedule.warmup_steps > config.training.steps) {
    fail<UsageError>("[lr_scheduler] warmup_steps ({}) must not be more than [training] steps ({})",
                     schedule.warmup_steps, config.training.steps);
  }
}

}  // namespace

topology::Layout validate(const Config& config, int world) {
  check_model_and_data(config);
  check_schedule(config);
  const auto& p = config.parallelism;
  try {
    auto layout =
        topology::Layout::make(world, {p.groups, p.data_parallel_shard_degree, p.data_parallel_replicate_degree});
    layout.require_equal_groups();
    return layout;
  } catch (const UsageError& e) {
    fail<UsageError>("[parallelism] {}", e.what());
  }
}

}  // namespace fedshard::train
