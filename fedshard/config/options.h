// From the keys of a config to the options of the rooms that need no torch.
#pragma once
#include "fedshard/config/config.h"
#include "fedshard/cost/formulas.h"
#include "fedshard/plan/units.h"

namespace fedshard::config {

int bytes_of(Dtype dtype);  // of an element

// The sizes of the configured model: the preset's or config.json's with what overrides them. Throws UsageError where
// not exactly one of preset and hf is given, the preset is unknown or the sizes don't fit together; what
// model::read_hf_config throws for the file.
model::Dims dims_of(const ModelConfig& config);

// What the optimizer does with each parameter.
plan::UpdateOptions update_options(const OptimizerConfig& config);

// What becomes of the groups' mean. `config` must come from load_config.
plan::OuterOptions outer_options(const FederationConfig& config);

// How what groups have changed travels; likewise.
plan::Compression compression_of(const FederationConfig& config);

// Who brings what to a round, and in which pieces.
topology::ExchangeRules exchange_rules(const FederationConfig& config);

// What rounds exchange; likewise.
plan::ExchangePatterns exchange_patterns(const FederationConfig& config);

// When groups exchange what, where they stay in step: otherwise K is plan::most_steps.
plan::RoundOptions round_options(const FederationConfig& config);

// The configured model, with its frozen and group-local parts. `dims` are dims_of(config.model).
plan::ModelPlan plan_of(const Config& config, const model::Dims& dims);

plan::ScheduleOptions schedule_options(const Config& config);

// What a micro-step's activations follow from.
model::MicroStepShape micro_step_shape(const Config& config, const plan::ModelPlan& plan);

// What bytes on the wire follow from. `config` must come from load_config.
cost::TrafficOptions traffic_options(const Config& config);

}  // namespace fedshard::config
