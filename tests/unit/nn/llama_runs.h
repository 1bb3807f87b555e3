// Runs a small Llama stage by stage, as the engine does.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

#include "fedshard/nn/init.h"
#include "fedshard/nn/llama.h"

namespace fedshard::nn {

using Units = std::vector<std::vector<at::Tensor>>;

inline model::Dims small(bool tied) {
  model::Dims dims = model::preset("llama-tiny");
  dims.num_hidden_layers = 2;
  dims.tie_word_embeddings = tied;
  return dims;
}

inline Units make_units(const Model& model, at::ScalarType dtype) {
  Units units;
  for (int u = 0; u < std::ssize(model.plan.units); ++u) {
    const plan::UnitSpec& spec = model.plan.units[u];
    const at::Tensor flat = at::empty({spec.numel()}, at::kFloat);
    initialize_slice(model.plan, 5, u, 0, spec.numel(),
                     {flat.data_ptr<float>(), static_cast<std::size_t>(spec.numel())});
    units.emplace_back();
    for (int i = 0; i < std::ssize(spec.parameters); ++i) {
      const at::Tensor part = flat.narrow(0, spec.offset_of(i), spec.parameters[i].numel());
      units.back().push_back(part.view(spec.parameters[i].shape).to(dtype).detach().clone().requires_grad_());
    }
  }
  return units;
}

// Stage by stage with each stage's graph of its own, as the engine runs them: returns the loss, fills the gradients.
inline at::Tensor run_detached(const Model& model, const Units& units, const MicroBatch& batch) {
  std::vector<at::Tensor> inputs{at::Tensor()};
  std::vector<at::Tensor> outputs;
  for (std::size_t s = 0; s < model.stages.size(); ++s) {
    outputs.push_back(model.stages[s](units[model.plan.stages[s].units.at(0)], inputs.back(), batch));
    inputs.push_back(outputs.back().detach().requires_grad_());
  }
  torch::autograd::backward({outputs.back()}, {});
  for (int s = static_cast<int>(model.stages.size()) - 2; s >= 0; --s) {
    torch::autograd::backward({outputs[s]}, {inputs[s + 1].grad()});
  }
  return outputs.back().detach();
}

inline MicroBatch make_batch(std::int64_t sequences, std::int64_t tokens) {
  return {at::randint(0, 320, {sequences, tokens}, at::kLong), at::randint(0, 320, {sequences, tokens}, at::kLong)};
}

}  // namespace fedshard::nn
