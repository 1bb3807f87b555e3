// activation_checkpoint changes what is kept, and not one bit of a loss or gradient.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "tests/unit/nn/llama_runs.h"

namespace fedshard::nn {
namespace {

using model::ActivationCheckpoint;

// As the engine runs `full`: blocks without a graph, and again, with one, before their backward.
at::Tensor run_full(const Model& model, const Units& units, const MicroBatch& batch) {
  const auto parameters = [&](int stage) { return Parameters(units[model.plan.stages[stage].units.at(0)]); };
  const int last = static_cast<int>(model.stages.size()) - 1;
  std::vector<at::Tensor> inputs{at::Tensor(), model.stages[0](parameters(0), {}, batch)};
  const at::Tensor embedded = inputs[1];
  for (int s = 1; s < last; ++s) {
    inputs[s] = inputs[s].detach().requires_grad_();
    const c10::NoGradGuard no_grad;
    inputs.push_back(model.stages[s](parameters(s), inputs[s], batch));
  }
  inputs[last] = inputs[last].detach().requires_grad_();
  const at::Tensor loss = model.stages[last](parameters(last), inputs[last], batch);
  torch::autograd::backward({loss}, {});
  for (int s = last - 1; s >= 1; --s) {
    torch::autograd::backward({model.stages[s](parameters(s), inputs[s], batch)}, {inputs[s + 1].grad()});
  }
  torch::autograd::backward({embedded}, {inputs[1].grad()});
  return loss.detach();
}

struct Result {
  at::Tensor loss;
  Units gradients;
};

Result run_mode(const model::Dims& dims, ActivationCheckpoint mode, at::ScalarType dtype, const MicroBatch& batch,
                at::ScalarType grad_dtype) {
  const Model model = make_llama(dims, {mode});
  const Units units = make_units(model, dtype);
  for (const auto& unit : units) {
    for (const at::Tensor& p : unit) {
      torch::autograd::impl::materialize_autograd_meta(p)->set_grad_dtype(grad_dtype, p);
    }
  }
  Result result{(mode == ActivationCheckpoint::full ? run_full : run_detached)(model, units, batch), {}};
  for (const auto& unit : units) {
    result.gradients.emplace_back();
    for (const at::Tensor& p : unit) result.gradients.back().push_back(p.grad());
  }
  return result;
}

TEST(CheckpointModes, GiveTheSameBits) {
  MicroBatch plain = make_batch(2, 33);
  plain.labels.slice(1, 2, 33, 5).fill_(-100);
  MicroBatch packed = plain;
  packed.documents = at::arange(33).floor_divide(7).expand({2, 33}).contiguous();
  for (const bool tied : {false, true}) {
    for (const auto& [dtype, grad_dtype] :
         {std::pair{at::kFloat, at::kFloat}, {at::kBFloat16, at::kBFloat16}, {at::kBFloat16, at::kFloat}}) {
      for (const MicroBatch& batch : {plain, packed}) {
        const Result none = run_mode(small(tied), ActivationCheckpoint::none, dtype, batch, grad_dtype);
        for (const auto mode : {ActivationCheckpoint::selective, ActivationCheckpoint::full}) {
          const Result other = run_mode(small(tied), mode, dtype, batch, grad_dtype);
          EXPECT_TRUE(at::equal(none.loss, other.loss));
          for (std::size_t u = 0; u < none.gradients.size(); ++u) {
            for (std::size_t i = 0; i < none.gradients[u].size(); ++i) {
              EXPECT_EQ(other.gradients[u][i].scalar_type(), grad_dtype);
              EXPECT_TRUE(at::equal(none.gradients[u][i], other.gradients[u][i]))
                  << "mode " << static_cast<int>(mode) << ", unit " << u << ", parameter " << i << ", " << dtype;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fedshard::nn
