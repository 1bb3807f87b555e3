// From the keys of a config to the options of each room.
#pragma once
#include "fedshard/data/loader.h"
#include "fedshard/federation/round.h"
#include "fedshard/model/activations.h"
#include "fedshard/nn/unit_module.h"
#include "fedshard/optim/lr_schedule.h"
#include "fedshard/optim/optimizer.h"
#include "fedshard/shard/engine.h"
#include "fedshard/train/config.h"

namespace fedshard::train {

// The configured model, with its frozen and group-local parts. `dims` are dims_of(config.model).
plan::ModelPlan plan_of(const Config& config, const model::Dims& dims);
nn::Model model_of(const Config& config, const model::Dims& dims);
// What a micro-step's activations follow from.
model::MicroStepShape micro_step_shape(const Config& config, const plan::ModelPlan& plan);
shard::EngineOptions engine_options(const Config& config, at::Device device = at::kCPU);
optim::OptimizerOptions optimizer_options(const Config& config);
optim::LrSchedule lr_schedule(const Config& config);
federation::FederationOptions federation_options(const Config& config);
// Sequences of one step: local_batch_size * gradient_accumulation_steps a rank, in rank order.
data::Dealing dealing_of(const Config& config, int world, int rank);

}  // namespace fedshard::train
