#include "fedshard/optim/optimizer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <vector>

#include "fedshard/optim/segments.h"

namespace fedshard::optim {
namespace {

// A unit's slices as lists of tensors, once with weight decay and once without, as the fused kernels take them.
struct Slices {
  double weight_decay = 0;
  std::vector<at::Tensor> parameters, gradients;
  std::vector<std::vector<at::Tensor>> moments;  // by moment
};

std::vector<std::vector<Slices>> slices_by_unit(shard::Engine& engine, const std::vector<const shard::Arena*>& moments,
                                                double weight_decay) {
  std::vector<std::vector<Slices>> units;
  for (int u = 0; u < engine.map().units(); ++u) {
    std::vector<Slices> slices(2);
    slices[1].weight_decay = weight_decay;
    for (Slices& s : slices) s.moments.resize(moments.size());
    for (const Segment& segment : segments_of(engine.plan().units[u], engine.map().range(u))) {
      Slices& s = slices[segment.decays];
      s.parameters.push_back(engine.parameters().slice(u, segment.range));
      s.gradients.push_back(engine.gradients().slice(u, segment.range));
      for (std::size_t m = 0; m < moments.size(); ++m) s.moments[m].push_back(moments[m]->slice(u, segment.range));
    }
    units.push_back(std::move(slices));
  }
  return units;
}

class AdamW final : public Optimizer {
 public:
  AdamW(const OptimizerOptions& options, shard::Engine& engine, shard::StateRegistry& registry)
      : options_(options),
        exp_avg_(engine.map()),
        exp_avg_sq_(engine.map()),
        units_(slices_by_unit(engine, {&exp_avg_, &exp_avg_sq_}, options.weight_decay)),
        step_(at::zeros({}, at::kFloat)) {
    registry.add("exp_avg", shard::Role::moments, shard::Scope::group, exp_avg_);
    registry.add("exp_avg_sq", shard::Role::moments, shard::Scope::group, exp_avg_sq_);
  }

  void step(int unit, std::int64_t step, double lr) override {
    const c10::NoGradGuard no_grad;
    step_.fill_(static_cast<double>(step));
    for (const Slices& s : units_[unit]) {
      if (s.parameters.empty()) continue;
      const std::vector<at::Tensor> steps(s.parameters.size(), step_);
      at::_fused_adamw_(s.parameters, s.gradients, s.moments[0], s.moments[1], {}, steps, lr, options_.beta1,
                        options_.beta2, s.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
    }
  }

 private:
  OptimizerOptions options_;
  shard::Arena exp_avg_, exp_avg_sq_;
  std::vector<std::vector<Slices>> units_;
  at::Tensor step_;
};

class Sgd final : public Optimizer {
 public:
  Sgd(const OptimizerOptions& options, shard::Engine& engine, shard::StateRegistry& registry) : options_(options) {
    std::vector<const shard::Arena*> moments;
    if (options.momentum != 0) {
      momentum_ = std::make_unique<shard::Arena>(engine.map());
      registry.add("momentum_buffer", shard::Role::moments, shard::Scope::group, *momentum_);
      moments.push_back(momentum_.get());
    }
    units_ = slices_by_unit(engine, moments, options.weight_decay);
  }

  void step(int unit, std::int64_t step, double lr) override {
    const c10::NoGradGuard no_grad;
    for (const Slices& s : units_[unit]) {
      if (s.parameters.empty()) continue;
      const at::TensorList momentum = momentum_ ? at::TensorList(s.moments[0]) : at::TensorList();
      at::_fused_sgd_(s.parameters, s.gradients, momentum, s.weight_decay, options_.momentum, lr, /*dampening=*/0.0,
                      /*nesterov=*/false, /*maximize=*/false, /*is_first_step=*/step == 1);
    }
  }

 private:
  OptimizerOptions options_;
  std::unique_ptr<shard::Arena> momentum_;
  std::vector<std::vector<Slices>> units_;
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, shard::Engine& engine,
                                          shard::StateRegistry& registry) {
  if (options.name == OptimizerOptions::Name::sgd) return std::make_unique<Sgd>(options, engine, registry);
  return std::make_unique<AdamW>(options, engine, registry);
}

}  // namespace fedshard::optim
