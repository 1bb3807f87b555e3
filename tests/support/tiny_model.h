// A small model of embedding, blocks and head with prime sizes, for tests of the engine; and the same model without any
// sharding, as plain autograd on whole tensors.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "fedshard/nn/unit_module.h"

namespace fedshard::testing_support {

struct TinyShape {
  int vocab = 11, hidden = 7, inner = 5, blocks = 3;
  bool tied = false;
};

inline nn::Model tiny_model(const TinyShape& shape) {
  nn::Model model;
  auto& plan = model.plan;
  plan.units.push_back({"embedding", {{"table", {shape.vocab, shape.hidden}, {}}}});
  if (shape.tied) plan.units[0].parameters.push_back({"gain", {1}, {}});
  plan.stages.push_back({"embedding", {0}, false});
  model.stages.push_back([](nn::Parameters p, const at::Tensor&, const nn::MicroBatch& batch) {
    return at::embedding(p[0], batch.tokens);
  });
  for (int b = 0; b < shape.blocks; ++b) {
    const auto name = [&](const char* part) { return "block" + std::to_string(b) + "." + part; };
    plan.units.push_back({name("unit"),
                          {{name("scale"), {shape.hidden}, {}},
                           {name("up"), {shape.inner, shape.hidden}, {}},
                           {name("down"), {shape.hidden, shape.inner}, {}},
                           {name("gain"), {1}, {}}}});
    plan.stages.push_back({name("stage"), {b + 1}});
    model.stages.push_back([](nn::Parameters p, const at::Tensor& x, const nn::MicroBatch&) {
      return x + at::linear(at::tanh(at::linear(x * p[0], p[1])), p[2]) * p[3];
    });
  }
  const int head_unit = shape.tied ? 0 : static_cast<int>(plan.units.size());
  if (!shape.tied) plan.units.push_back({"head", {{"gain", {1}, {}}, {"projection", {shape.vocab, shape.hidden}, {}}}});
  plan.stages.push_back({"head", {head_unit}});
  model.stages.push_back([tied = shape.tied](nn::Parameters p, const at::Tensor& x, const nn::MicroBatch& batch) {
    const at::Tensor logits = at::linear(x * p[tied ? 1 : 0], p[tied ? 0 : 1]).to(at::kFloat);
    return at::cross_entropy_loss(logits.flatten(0, 1), batch.labels.flatten(), {}, at::Reduction::Sum, -100);
  });
  plan.validate();
  return model;
}

// The value that element `index` (global) starts with.
inline float tiny_value(std::int64_t index) {
  return 0.5f * static_cast<float>(std::sin(1.7 * static_cast<double>(index) + 0.3));
}

// Sequences 0, 1, 2, ... of one endless stream; each depends on its number alone.
inline nn::MicroBatch tiny_batch(std::int64_t first, std::int64_t count, std::int64_t length, int vocab) {
  const at::Tensor ids = at::empty({count, length + 1}, at::kLong);
  for (std::int64_t s = 0; s < count; ++s) {
    std::mt19937_64 random(static_cast<std::uint64_t>(first + s) * 7919 + 1);
    for (std::int64_t t = 0; t <= length; ++t) {
      ids.data_ptr<std::int64_t>()[s * (length + 1) + t] =
          static_cast<std::int64_t>(random() % static_cast<unsigned>(vocab));
    }
  }
  return {ids.narrow(1, 0, length).clone(), ids.narrow(1, 1, length).clone()};  // so that labels can be masked
}

// Of all parameters in frozen units.
inline std::set<std::string> names_of_frozen(const plan::ModelPlan& plan) {
  std::set<std::string> names;
  for (const auto& unit : plan.units) {
    for (const auto& parameter : unit.parameters) {
      if (unit.frozen) names.insert(parameter.name);
    }
  }
  return names;
}

// Whole parameters, plain autograd.
class TinyReference {
 public:
  // `model` without frozen parts; those named by `frozen` get no gradients.
  explicit TinyReference(const nn::Model& model, const std::set<std::string>& frozen = {}) : model_(model) {
    std::int64_t index = 0;
    for (const auto& unit : model.plan.units) {
      parameters_.emplace_back();
      for (const auto& spec : unit.parameters) {
        at::Tensor value = at::empty(spec.shape, at::kFloat);
        for (std::int64_t i = 0; i < value.numel(); ++i) value.data_ptr<float>()[i] = tiny_value(index++);
        parameters_.back().push_back(value.set_requires_grad(frozen.count(spec.name) == 0));
      }
    }
  }

  // The mean loss; gradients of it are left in .grad.
  double backward(const nn::MicroBatch& batch) {
    for (auto& unit : parameters_) {
      for (auto& p : unit) p.mutable_grad().reset();
    }
    at::Tensor x;
    for (std::size_t s = 0; s < model_.stages.size(); ++s) {
      x = model_.stages[s](parameters_[model_.plan.stages[s].units.at(0)], x, batch);
    }
    const at::Tensor loss = x / batch.labels.ge(0).sum();
    torch::autograd::backward({loss}, {});
    return loss.item<double>();
  }

  // Of the whole model in the order of the global index; zeros where there is no gradient.
  at::Tensor flat(bool gradients) const {
    std::vector<at::Tensor> parts;
    for (const auto& unit : parameters_) {
      for (const auto& p : unit) {
        const at::Tensor value = gradients ? p.grad() : p.detach();
        parts.push_back(value.defined() ? value.flatten() : at::zeros({p.numel()}));
      }
    }
    return at::cat(parts);
  }

  std::vector<std::vector<at::Tensor>>& parameters() { return parameters_; }  // by unit

  // A step of plain gradient descent.
  void descend(double rate) {
    const c10::NoGradGuard no_grad;
    for (auto& unit : parameters_) {
      for (auto& p : unit) {
        if (p.grad().defined()) p.sub_(p.grad(), rate);
      }
    }
  }

 private:
  const nn::Model& model_;
  std::vector<std::vector<at::Tensor>> parameters_;
};

// What a rank holds of `flat` ([elements of the model], by global index): the elements `held` of a unit.
inline at::Tensor held_of(const plan::ModelPlan& plan, int unit, topology::Range held, const at::Tensor& flat) {
  std::vector<at::Tensor> parts{at::empty({0})};
  for (const auto& run : plan.global_runs(unit, held)) parts.push_back(flat.narrow(0, run.index, run.range.size()));
  return at::cat(parts);
}

// For Engine::fill: every element by its global index.
inline auto tiny_filler(const plan::ModelPlan& plan) {
  return [&plan](int unit, topology::Range range, std::span<float> out) {
    for (const auto& run : plan.global_runs(unit, range)) {
      for (std::int64_t i = 0; i < run.range.size(); ++i)
        out[run.range.begin - range.begin + i] = tiny_value(run.index + i);
    }
  };
}

}  // namespace fedshard::testing_support
