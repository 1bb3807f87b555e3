#include "fedshard/optim/optimizer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/optim/moments.h"
#include "fedshard/optim/muon.h"
#include "fedshard/optim/segments.h"
#include "fedshard/optim/workplace.h"

namespace fedshard::optim {
namespace {

// A unit's slices that share a rule, as lists of tensors, which the fused kernels take.
struct Slices {
  plan::UpdateRule rule;
  std::vector<at::Tensor> parameters, gradients;
  std::vector<std::vector<at::Tensor>> moments;  // by moment
};

// All but what Muon updates or nothing does.
std::vector<Slices> slices_of_unit(int unit, const plan::UpdateRules& rules, const Moments& moments,
                                   const Workplace& place, shard::Engine& engine) {
  std::vector<Slices> slices;
  for (const Segment& segment : segments_of(engine.plan().units[unit], rules[unit], engine.map().range(unit))) {
    if (segment.rule.update == plan::Update::muon || segment.rule.update == plan::Update::none) continue;
    auto s = std::find_if(slices.begin(), slices.end(), [&](const Slices& x) { return x.rule == segment.rule; });
    if (s == slices.end()) {
      s = slices.insert(slices.end(), {segment.rule, {}, {}, {}});
      s->moments.resize(plan::moments_of(segment.rule.update));
    }
    s->parameters.push_back(place.parameters(unit, segment.range));
    s->gradients.push_back(place.gradients(unit, segment.range));
    for (std::size_t m = 0; m < s->moments.size(); ++m) {
      s->moments[m].push_back(moments.arena(static_cast<int>(m)).slice(unit, segment.range));
    }
  }
  return slices;
}

std::vector<std::string> names_of_moments(plan::Update update) {
  if (update == plan::Update::sgd_momentum) return {"momentum_buffer"};
  return {"exp_avg", "exp_avg_sq"};
}

class ByRule final : public Optimizer {
 public:
  ByRule(const OptimizerOptions& options, shard::Engine& engine, comm::Axes& axes, shard::StateRegistry& registry)
      : options_(options),
        rules_(plan::update_rules(engine.plan(), options.updates)),
        place_(engine, options.offload),
        moments_(names_of_moments(options.updates.update), rules_, engine, place_.device(), registry),
        step_(at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(place_.device()))) {
    for (int u = 0; u < engine.map().units(); ++u) {
      units_.push_back(slices_of_unit(u, rules_, moments_, place_, engine));
    }
    if (options.updates.update == plan::Update::muon) {
      muon_ = std::make_unique<Muon>(MuonOptions{options.momentum, options.nesterov}, rules_, engine, place_,
                                     moments_.arena(0), *axes.shard);
    }
  }

  void step(int unit, std::int64_t step, double lr) override {
    const c10::NoGradGuard no_grad;
    place_.begin(unit);
    for (const Slices& s : units_[unit]) {
      const double rate = lr * s.rule.lr_factor;
      if (s.rule.update == plan::Update::adamw) {
        adamw(s, step, rate);
      } else {
        sgd(s, step, rate);
      }
    }
    if (muon_) muon_->step(unit, lr);
    place_.end(unit);
  }

  void reset() override { moments_.clear(); }

 private:
  void adamw(const Slices& s, std::int64_t step, double lr) {
    step_.fill_(static_cast<double>(step));
    const std::vector<at::Tensor> steps(s.parameters.size(), step_);
    at::_fused_adamw_(s.parameters, s.gradients, s.moments[0], s.moments[1], {}, steps, lr, options_.beta1,
                      options_.beta2, s.rule.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }

  void sgd(const Slices& s, std::int64_t step, double lr) {
    const bool has_momentum = s.rule.update == plan::Update::sgd_momentum;
    at::_fused_sgd_(s.parameters, s.gradients, has_momentum ? at::TensorList(s.moments[0]) : at::TensorList(),
                    s.rule.weight_decay, has_momentum ? options_.momentum : 0.0, lr, /*dampening=*/0.0,
                    has_momentum && options_.nesterov, /*maximize=*/false, /*is_first_step=*/step == 1);
  }

  OptimizerOptions options_;
  plan::UpdateRules rules_;
  Workplace place_;
  Moments moments_;
  std::vector<std::vector<Slices>> units_;
  at::Tensor step_;
  std::unique_ptr<Muon> muon_;  // with Update::muon only
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, shard::Engine& engine, comm::Axes& axes,
                                          shard::StateRegistry& registry) {
  return std::make_unique<ByRule>(options, engine, axes, registry);
}

}  // namespace fedshard::optim
