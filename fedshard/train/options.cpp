#include "fedshard/train/options.h"

#include <ATen/ATen.h>

#include "fedshard/config/options.h"
#include "fedshard/nn/llama.h"

namespace fedshard::train {
namespace {

at::ScalarType scalar_type(config::Dtype dtype) { return dtype == config::Dtype::bf16 ? at::kBFloat16 : at::kFloat; }

}  // namespace

nn::Model model_of(const config::Config& config, const model::Dims& dims) {
  nn::Model model = nn::make_llama(dims, {config.training.activation_checkpoint});
  model.plan = config::plan_of(config, dims);
  return model;
}

shard::EngineOptions engine_options(const config::Config& config, at::Device device) {
  shard::EngineOptions options;
  options.device = device;
  options.dtypes = {scalar_type(config.training.dtype), scalar_type(config.training.reduce_dtype),
                    scalar_type(config.training.master_dtype)};
  options.schedule = config::schedule_options(config);
  options.max_norm = config.training.max_norm;
  options.nonfinite =
      config.training.nonfinite == config::NonFinite::skip ? shard::NonFinite::skip : shard::NonFinite::stop;
  return options;
}

optim::OptimizerOptions optimizer_options(const config::Config& config) {
  const config::OptimizerConfig& o = config.optimizer;
  optim::OptimizerOptions options;
  options.updates = config::update_options(o);
  options.beta1 = o.beta1;
  options.beta2 = o.beta2;
  options.eps = o.eps;
  options.momentum = o.momentum.value_or(0);
  options.nesterov = o.nesterov.value_or(false);
  options.offload = o.offload;
  return options;
}

optim::LrSchedule lr_schedule(const config::Config& config) {
  const config::LrSchedulerConfig& s = config.lr_scheduler;
  optim::LrSchedule schedule;
  schedule.lr = config.optimizer.lr;
  schedule.warmup_steps = s.warmup_steps;
  schedule.decay = s.decay == config::Decay::cosine   ? optim::LrSchedule::Decay::cosine
                   : s.decay == config::Decay::linear ? optim::LrSchedule::Decay::linear
                                                      : optim::LrSchedule::Decay::none;
  schedule.stable_steps = s.stable_steps;
  schedule.decay_steps = s.decay_steps > 0 ? s.decay_steps : config.training.steps - s.warmup_steps - s.stable_steps;
  schedule.min_lr_factor = s.min_lr_factor;
  return schedule;
}

federation::FederationOptions federation_options(const config::Config& config) {
  federation::FederationOptions options;
  if (const auto* fixed = std::get_if<std::vector<double>>(&config.federation.weights)) {
    options.weights = {federation::WeighBy::fixed, *fixed};
  } else if (std::get<config::WeightsBy>(config.federation.weights) == config::WeightsBy::uniform) {
    options.weights.by = federation::WeighBy::group;
  }
  options.outer = config::outer_options(config.federation);
  options.exchange = config::exchange_rules(config.federation);
  options.compression = config::compression_of(config.federation);
  options.guard = config.federation.guard;
  options.rounds = config::round_options(config.federation);
  options.mix = config.federation.mix;
  options.measures = config.federation.measures;
  options.prox_mu = config.federation.prox_mu;
  options.average_moments = config.federation.inner_state == config::InnerState::average;
  return options;
}

data::Dealing dealing_of(const config::Config& config, int world, int rank) {
  const std::int64_t mine = config.training.local_batch_size * config.training.gradient_accumulation_steps;
  return {mine * world, mine * rank, mine};
}

}  // namespace fedshard::train
