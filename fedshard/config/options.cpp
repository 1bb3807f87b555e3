#include "fedshard/config/options.h"

#include "fedshard/base/error.h"
#include "fedshard/model/hf_config.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::config {
namespace {

using base::fail;
using base::UsageError;

template <class T>
void override_with(T& value, const std::optional<T>& given) {
  if (given) value = *given;
}

// With one group there are no rounds, so that nothing is kept from them.
bool has_groups(const ParallelismConfig& config) {
  const auto* sizes = std::get_if<std::vector<int>>(&config.groups);
  return (sizes != nullptr ? static_cast<int>(sizes->size()) : std::get<int>(config.groups)) > 1;
}

}  // namespace

int bytes_of(Dtype dtype) { return dtype == Dtype::bf16 ? 2 : 4; }

model::Dims dims_of(const ModelConfig& config) {
  if (config.preset.empty() && config.hf.empty()) {
    fail<UsageError>("[model] needs preset or hf: which model is trained?");
  }
  if (!config.preset.empty() && !config.hf.empty()) {
    fail<UsageError>("[model] has both preset = \"{}\" and hf = \"{}\"; give one of them", config.preset, config.hf);
  }
  auto dims = config.hf.empty() ? model::preset(config.preset)
                                : model::read_hf_config(std::filesystem::path(config.hf) / "config.json");
  override_with(dims.hidden_size, config.hidden_size);
  override_with(dims.intermediate_size, config.intermediate_size);
  override_with(dims.num_hidden_layers, config.num_hidden_layers);
  override_with(dims.num_attention_heads, config.num_attention_heads);
  override_with(dims.num_key_value_heads, config.num_key_value_heads);
  override_with(dims.head_dim, config.head_dim);
  override_with(dims.vocab_size, config.vocab_size);
  override_with(dims.max_position_embeddings, config.max_position_embeddings);
  override_with(dims.rope_theta, config.rope_theta);
  if (config.rope_scaling) dims.rope_scaling = config.rope_scaling;
  override_with(dims.rms_norm_eps, config.rms_norm_eps);
  override_with(dims.initializer_range, config.initializer_range);
  override_with(dims.tie_word_embeddings, config.tie_word_embeddings);
  dims.validate();
  return dims;
}

plan::UpdateOptions update_options(const OptimizerConfig& config) {
  plan::UpdateOptions options;
  switch (config.name) {
    case OptimizerName::adamw:
      options.update = plan::Update::adamw;
      break;
    case OptimizerName::sgd:
      options.update = config.momentum.value_or(0) == 0 ? plan::Update::sgd : plan::Update::sgd_momentum;
      break;
    case OptimizerName::muon:
      options.update = plan::Update::muon;
      break;
  }
  options.weight_decay = config.weight_decay;
  options.groups = config.groups;
  return options;
}

plan::OuterOptions outer_options(const FederationConfig& config) {
  plan::OuterOptions options = plan::usual_options(config.outer);
  override_with(options.lr, config.outer_lr);
  override_with(options.momentum, config.outer_momentum);
  override_with(options.beta1, config.outer_beta1);
  override_with(options.beta2, config.outer_beta2);
  override_with(options.tau, config.outer_tau);
  options.max_norm = config.outer_max_norm;
  return options;
}

plan::Compression compression_of(const FederationConfig& config) {
  plan::Compression compression = plan::usual_compression(config.compress);
  override_with(compression.block, config.block);
  override_with(compression.top_k, config.top_k);
  return compression;
}

topology::ExchangeRules exchange_rules(const FederationConfig& config) {
  return {config.scheme, config.bucket, config.concurrency};
}

plan::RoundOptions round_options(const FederationConfig& config) {
  return {plan::most_steps(config.every), static_cast<int>(config.fragments), config.delay, config.start_step};
}

plan::ExchangePatterns exchange_patterns(const FederationConfig& config) { return {config.include, config.exclude}; }

plan::ModelPlan plan_of(const Config& config, const model::Dims& dims) {
  plan::ModelPlan plan = plan::freeze(plan::llama_plan(dims), config.training.freeze);
  return has_groups(config.parallelism) ? plan::keep_in_groups(plan, exchange_patterns(config.federation)) : plan;
}

plan::ScheduleOptions schedule_options(const Config& config) {
  plan::ScheduleOptions options;
  options.micro_steps = static_cast<int>(config.training.gradient_accumulation_steps);
  options.reshard_after_forward = config.parallelism.fsdp_reshard_after_forward;
  options.prefetch = config.parallelism.prefetch;
  options.recompute = config.training.activation_checkpoint == ActivationCheckpoint::full;
  options.reduce_each_micro_step = config.training.reduce_each_micro_step;
  options.fused_backward = config.optimizer.fused_backward;
  return options;
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
  return {t.local_batch_size, t.seq_len, bytes_of(t.dtype), t.activation_checkpoint, t.document_mask, frozen_head};
}

cost::TrafficOptions traffic_options(const Config& config) {
  return {schedule_options(config),
          bytes_of(config.training.dtype),
          bytes_of(config.training.reduce_dtype),
          bytes_of(config.training.master_dtype),
          update_options(config.optimizer),
          compression_of(config.federation),
          exchange_rules(config.federation),
          config.federation.inner_state == InnerState::average};
}

}  // namespace fedshard::config
