#include "fedshard/train/options.h"

#include <ATen/ATen.h>

#include "fedshard/nn/llama.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/plan/group_local.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::train {
namespace {

at::ScalarType scalar_type(Dtype dtype) { return dtype == Dtype::bf16 ? at::kBFloat16 : at::kFloat; }

// With one group there are no rounds, so that nothing is kept from them.
bool has_groups(const ParallelismConfig& config) {
  const auto* sizes = std::get_if<std::vector<int>>(&config.groups);
  return (sizes != nullptr ? static_cast<int>(sizes->size()) : std::get<int>(config.groups)) > 1;
}

}  // namespace

plan::ModelPlan plan_of(const Config& config, const model::Dims& dims) {
  plan::ModelPlan plan = plan::freeze(plan::llama_plan(dims), config.training.freeze);
  return has_groups(config.parallelism) ? plan::keep_in_groups(plan, exchange_patterns(config.federation)) : plan;
}

nn::Model model_of(const Config& config, const model::Dims& dims) {
  nn::Model model = nn::make_llama(dims, {config.training.activation_checkpoint});
  model.plan = plan_of(config, dims);
  return model;
}

model::MicroStepShape micro_step_shape(const Config& config, const plan::ModelPlan& plan) {
  const TrainingConfig& t = config.training;
  // Of the head's parameters, the table is the one that is a matrix.
  bool frozen_head = false;
  for (const int u : plan.stages.back().units) {
    for (const plan::ParameterSpec& p : plan.units[u].parameters) {
      if (p.is_matrix()) frozen_head = plan.units[u].frozen;
    }
  }
  return {t.local_batch_size,      t.seq_len,       static_cast<std::int64_t>(c10::elementSize(scalar_type(t.dtype))),
          t.activation_checkpoint, t.document_mask, frozen_head};
}

shard::EngineOptions engine_options(const Config& config, at::Device device) {
  shard::EngineOptions options;
  options.device = device;
  options.dtypes = {scalar_type(config.training.dtype), scalar_type(config.training.reduce_dtype),
                    scalar_type(config.training.master_dtype)};
  options.schedule.micro_steps = static_cast<int>(config.training.gradient_accumulation_steps);
  options.schedule.reshard_after_forward = config.parallelism.fsdp_reshard_after_forward;
  options.schedule.prefetch = config.parallelism.prefetch;
  options.schedule.recompute = config.training.activation_checkpoint == ActivationCheckpoint::full;
  options.schedule.reduce_each_micro_step = config.training.reduce_each_micro_step;
  options.schedule.fused_backward = config.optimizer.fused_backward;
  options.max_norm = config.training.max_norm;
  options.nonfinite = config.training.nonfinite == NonFinite::skip ? shard::NonFinite::skip : shard::NonFinite::stop;
  return options;
}

optim::OptimizerOptions optimizer_options(const Config& config) {
  const OptimizerConfig& o = config.optimizer;
  optim::OptimizerOptions options;
  options.updates = update_options(o);
  options.beta1 = o.beta1;
  options.beta2 = o.beta2;
  options.eps = o.eps;
  options.momentum = o.momentum.value_or(0);
  options.nesterov = o.nesterov.value_or(false);
  options.offload = o.offload;
  return options;
}

optim::LrSchedule lr_schedule(const Config& config) {
  const LrSchedulerConfig& s = config.lr_scheduler;
  optim::LrSchedule schedule;
  schedule.lr = config.optimizer.lr;
  schedule.warmup_steps = s.warmup_steps;
  schedule.decay = s.decay == Decay::cosine   ? optim::LrSchedule::Decay::cosine
                   : s.decay == Decay::linear ? optim::LrSchedule::Decay::linear
                                              : optim::LrSchedule::Decay::none;
  schedule.stable_steps = s.stable_steps;
  schedule.decay_steps = s.decay_steps > 0 ? s.decay_steps : config.training.steps - s.warmup_steps - s.stable_steps;
  schedule.min_lr_factor = s.min_lr_factor;
  return schedule;
}

federation::FederationOptions federation_options(const Config& config) {
  federation::FederationOptions options;
  if (const auto* fixed = std::get_if<std::vector<double>>(&config.federation.weights)) {
    options.weights = {federation::WeighBy::fixed, *fixed};
  } else if (std::get<WeightsBy>(config.federation.weights) == WeightsBy::uniform) {
    options.weights.by = federation::WeighBy::group;
  }
  options.outer = outer_options(config.federation);
  options.exchange = exchange_rules(config.federation);
  options.compression = compression_of(config.federation);
  options.guard = config.federation.guard;
  options.rounds = round_options(config.federation);
  options.mix = config.federation.mix;
  options.measures = config.federation.measures;
  options.prox_mu = config.federation.prox_mu;
  options.average_moments = config.federation.inner_state == InnerState::average;
  return options;
}

data::Dealing dealing_of(const Config& config, int world, int rank) {
  const std::int64_t mine = config.training.local_batch_size * config.training.gradient_accumulation_steps;
  return {mine * world, mine * rank, mine};
}

}  // namespace fedshard::train
