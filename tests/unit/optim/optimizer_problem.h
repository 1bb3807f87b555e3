// A model of awkward parameters with made-up gradients, on which the tests run optimizers alone: no forward, no
// backward.
#pragma once
#include <ATen/ATen.h>

#include <cmath>
#include <functional>
#include <vector>

#include "fedshard/optim/optimizer.h"
#include "tests/support/rank_threads.h"

namespace fedshard::optim {

inline constexpr int kSteps = 50;

// Units with matrices and vectors in turn, of prime and tiny sizes: with 5 shards some cut parameters and some are
// empty. Muon is meant for the matrices of "two", "large" and "wide", which are neither first nor last.
inline nn::Model units_of_parameters() {
  nn::Model model;
  plan::ModelPlan& plan = model.plan;
  plan.units = {{"mixed", {{"a", {3, 7}, {}}, {"b", {5}, {}}, {"c", {1}, {}}, {"d", {2, 2}, {}}, {"e", {2, 1, 2}, {}}}},
                {"one", {{"f", {1}, {}}}},
                {"two", {{"g", {1, 2}, {}}}},
                {"large", {{"h", {29, 31}, {}}, {"i", {97}, {}}, {"j", {13, 3}, {}}}},
                {"wide", {{"m", {3, 50}, {}}, {"n", {7}, {}}, {"o", {2, 3, 2}, {}}, {"q", {50, 3}, {}}}},
                {"vectors", {{"k", {11}, {}}, {"l", {8}, {}}}}};
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    plan.stages.push_back({plan.units[u].name, {u}});
    model.stages.push_back([](nn::Parameters, const at::Tensor& x, const nn::MicroBatch&) { return x; });
  }
  return model;
}

inline float start_value(std::int64_t index) { return 0.7f * std::sin(1.3f * static_cast<float>(index) + 0.2f); }

// Gradients of many magnitudes, of both signs, and sometimes zero.
inline float gradient_value(std::int64_t index, std::int64_t step) {
  if ((index + step) % 17 == 0) return 0;
  const double phase = 0.37 * static_cast<double>(index) + 1.9 * static_cast<double>(step);
  return static_cast<float>(std::sin(phase) * std::pow(10.0, static_cast<double>(index % 7) - 5));
}

inline double rate(std::int64_t step) { return 0.01 * (1 + 0.5 * std::sin(static_cast<double>(step))); }

inline void write(const plan::ModelPlan& plan, const shard::Arena& arena,
                  const std::function<float(std::int64_t)>& value) {
  for (int u = 0; u < arena.map().units(); ++u) {
    const topology::Range held = arena.map().range(u);
    float* out = arena.real(u).mutable_data_ptr<float>();
    for (std::int64_t i = 0; i < held.size(); ++i) out[i] = value(plan.global_offset(u) + held.begin + i);
  }
}

// Updates `first` to `last`, both included.
inline void run_steps(Optimizer& optimizer, shard::Engine& engine, std::int64_t first, std::int64_t last) {
  for (std::int64_t step = first; step <= last; ++step) {
    write(engine.plan(), engine.gradients(), [&](std::int64_t index) { return gradient_value(index, step); });
    for (int u = 0; u < engine.map().units(); ++u) optimizer.step(u, step, rate(step));
  }
}

// Called on each rank after the last step, if anything is to be looked at there.
using Inspect = std::function<void(const shard::Engine&, const shard::StateRegistry&)>;

// The parameters after kSteps on `shards` ranks, by global index.
inline std::vector<float> sharded_result(const OptimizerOptions& options, int shards, const Inspect& inspect = {}) {
  const nn::Model model = units_of_parameters();
  const plan::ModelPlan& plan = model.plan;
  std::vector<float> result(static_cast<std::size_t>(plan.numel()), std::nanf(""));
  testing_support::on_ranks(topology::Layout::make(shards, {}), [&](int rank, comm::Axes& axes) {
    shard::StateRegistry registry;
    shard::Engine engine(model, shards, rank, axes, {}, registry);
    write(plan, engine.parameters(), start_value);
    const auto optimizer = make_optimizer(options, engine, axes, registry);
    run_steps(*optimizer, engine, 1, kSteps);
    if (inspect) inspect(engine, registry);
    for (int u = 0; u < engine.map().units(); ++u) {
      const topology::Range held = engine.map().range(u);
      const float* values = engine.parameters().real(u).const_data_ptr<float>();
      std::copy(values, values + held.size(), result.begin() + plan.global_offset(u) + held.begin);
    }
  });
  return result;
}

struct NamedOptions {
  const char* name;
  OptimizerOptions options;
};

inline std::vector<NamedOptions> all_options() {
  using plan::Update;
  const std::vector<plan::ParameterGroup> groups{{{"h", "[ef]"}, 0.5, {}}, {{"*"}, 2, 0.25}};
  return {
      {"adamw", {.updates = {Update::adamw, 0.1, {}}}},
      {"adamw, other constants", {.updates = {Update::adamw, 0.5, {}}, .beta1 = 0.8, .beta2 = 0.999, .eps = 1e-3}},
      {"adamw without decay", {.updates = {Update::adamw, 0, {}}}},
      {"adamw in groups", {.updates = {Update::adamw, 0.1, groups}}},
      {"sgd", {.updates = {Update::sgd, 0, {}}}},
      {"sgd with decay", {.updates = {Update::sgd, 0.3, {}}}},
      {"sgd in groups", {.updates = {Update::sgd, 0.3, groups}}},
      {"sgd with momentum", {.updates = {Update::sgd_momentum, 0, {}}, .momentum = 0.9}},
      {"sgd with momentum and decay", {.updates = {Update::sgd_momentum, 0.3, {}}, .momentum = 0.9}},
      {"sgd, Nesterov", {.updates = {Update::sgd_momentum, 0.3, {}}, .momentum = 0.9, .nesterov = true}},
      {"muon", {.updates = {Update::muon, 0.1, {}}, .momentum = 0.95, .nesterov = true}},
      {"muon without Nesterov", {.updates = {Update::muon, 0, {}}, .momentum = 0.8}},
      {"muon in groups", {.updates = {Update::muon, 0.1, groups}, .momentum = 0.95, .nesterov = true}},
  };
}

}  // namespace fedshard::optim
