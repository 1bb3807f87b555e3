#include "fedshard/nn/llama.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "fedshard/base/error.h"
#include "tests/unit/nn/llama_runs.h"

namespace fedshard::nn {
namespace {

TEST(Llama, AFreshModelGuessesUniformly) {
  for (const bool tied : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Model model = make_llama(small(tied));
      const at::Tensor loss = run_detached(model, make_units(model, dtype), make_batch(2, 16));
      EXPECT_EQ(loss.scalar_type(), at::kFloat);
      EXPECT_EQ(loss.dim(), 0);
      EXPECT_NEAR(loss.item<float>() / 32, std::log(320.0), 0.1) << tied << " " << dtype;
    }
  }
}

TEST(Llama, GradientsAgreeWithFiniteDifferences) {
  const Model model = make_llama(small(true));
  const MicroBatch batch = make_batch(2, 8);
  const Units units = make_units(model, at::kFloat);
  run_detached(model, units, batch);
  for (int u = 0; u < std::ssize(units); ++u) {
    for (int i = 0; i < std::ssize(units[u]); ++i) {
      const at::NoGradGuard no_grad;
      const at::Tensor grad = units[u][i].grad().clone();
      const at::Tensor direction = grad / grad.norm();
      // Along its own gradient the loss climbs with the gradient's norm. In fp32 the step can't be tiny.
      const double step = 0.02;
      const at::Tensor base = units[u][i].detach().clone();
      const auto loss_at = [&](double t) {
        units[u][i].copy_(base + t * direction);
        at::Tensor hidden;
        for (std::size_t s = 0; s < model.stages.size(); ++s) {
          hidden = model.stages[s](units[model.plan.stages[s].units.at(0)], hidden, batch);
        }
        return static_cast<double>(hidden.item<float>());
      };
      const double slope = (loss_at(step) - loss_at(-step)) / (2 * step);
      loss_at(0.0);
      EXPECT_NEAR(slope / grad.norm().item<double>(), 1.0, 0.02) << model.plan.units[u].parameters[i].name;
    }
  }
}

TEST(Llama, ATiedTableCollectsTheGradientsOfBothUses) {
  const Model tied = make_llama(small(true));
  const Model untied = make_llama(small(false));
  Units root = make_units(tied, at::kFloat);
  Units apart = make_units(untied, at::kFloat);
  for (const std::size_t u : {1, 2}) {
    for (std::size_t i = 0; i < root[u].size(); ++i) apart[u][i] = root[u][i].detach().clone().requires_grad_();
  }
  apart[0][0] = root[0][0].detach().clone().requires_grad_();
  apart[3] = {root[0][1].detach().clone().requires_grad_(), root[0][0].detach().clone().requires_grad_()};
  const MicroBatch batch = make_batch(2, 16);
  EXPECT_EQ(run_detached(tied, root, batch).item<float>(), run_detached(untied, apart, batch).item<float>());
  EXPECT_TRUE(at::allclose(root[0][0].grad(), apart[0][0].grad() + apart[3][1].grad(), 1e-5, 1e-7));
  EXPECT_TRUE(at::equal(root[0][1].grad(), apart[3][0].grad()));
}

TEST(Llama, LogitsAreWhatTheLossIsMadeOf) {
  for (const bool tied : {false, true}) {
    const model::Dims dims = small(tied);
    const Model model = make_llama(dims);
    const Units units = make_units(model, at::kFloat);
    const MicroBatch batch = make_batch(3, 5);
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor>& head = units[model.plan.stages.back().units.at(0)];
    const at::Tensor hidden = at::randn({3, 5, 96});
    const at::Tensor logits = llama_logits(dims, head, hidden);
    ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{3, 5, 320}));
    const at::Tensor loss =
        at::cross_entropy_loss(logits.view({-1, 320}), batch.labels.view({-1}), {}, at::Reduction::Sum);
    EXPECT_NEAR(model.stages.back()(head, hidden, batch).item<float>(), loss.item<float>(), 1e-3);
  }
}

TEST(Llama, BatchesAndSequencesOfOne) {
  const Model model = make_llama(small(false));
  const Units units = make_units(model, at::kFloat);
  const MicroBatch batch = make_batch(1, 1);
  EXPECT_TRUE(std::isfinite(run_detached(model, units, batch).item<float>()));
}

TEST(Llama, RefusesWhatItCannotCompute) {
  model::Dims dims = small(false);
  dims.max_position_embeddings = 8;
  const Model model = make_llama(dims);
  const Units units = make_units(model, at::kFloat);
  EXPECT_THROW(run_detached(model, units, make_batch(1, 9)), base::UsageError);
  MicroBatch beyond = make_batch(1, 4);
  beyond.tokens.fill_(320);
  EXPECT_ANY_THROW(run_detached(model, units, beyond));
  EXPECT_THROW(model.stages[1](Parameters(units[1]).first(8), at::zeros({1, 4, 96}), beyond), base::RunError);
}

}  // namespace
}  // namespace fedshard::nn
