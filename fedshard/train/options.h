// From the keys of a config to the options of each room.
#pragma once
#include "fedshard/config/config.h"
#include "fedshard/data/loader.h"
#include "fedshard/federation/round.h"
#include "fedshard/nn/unit_module.h"
#include "fedshard/optim/lr_schedule.h"
#include "fedshard/optim/optimizer.h"
#include "fedshard/shard/engine.h"

namespace fedshard::train {

// With its frozen and group-local parts. `dims` are config::dims_of(config.model).
nn::Model model_of(const config::Config& config, const model::Dims& dims);
shard::EngineOptions engine_options(const config::Config& config, at::Device device = at::kCPU);
optim::OptimizerOptions optimizer_options(const config::Config& config);
optim::LrSchedule lr_schedule(const config::Config& config);
federation::FederationOptions federation_options(const config::Config& config);
// Sequences of one step: local_batch_size * gradient_accumulation_steps a rank, in rank order.
data::Dealing dealing_of(const config::Config& config, int world, int rank);

}  // namespace fedshard::train
