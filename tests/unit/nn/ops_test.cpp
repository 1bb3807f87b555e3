// Each operation against its plain reference and against numbers worked out by other means.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <thread>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/nn/ops/attention.h"
#include "fedshard/nn/ops/cross_entropy.h"
#include "fedshard/nn/ops/rms_norm.h"
#include "fedshard/nn/ops/rotary.h"
#include "fedshard/nn/ops/swiglu.h"

namespace fedshard::nn {
namespace {

using Tensors = std::vector<at::Tensor>;
using Operation = std::function<at::Tensor(const Tensors&)>;

at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::randn(shape, at::TensorOptions().dtype(at::kFloat)).to(dtype);
}

double error(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor wide = b.to(at::kDouble);
  return ((a.to(at::kDouble) - wide).abs().max() / wide.abs().max().clamp_min(1e-30)).item<double>();
}

// The output and the gradients of all inputs for one fixed random output gradient.
Tensors run(const Operation& operation, const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  const at::Tensor output = operation(leaves);
  at::manual_seed(3);
  const at::Tensor grad = at::randn(output.sizes(), at::TensorOptions().dtype(at::kFloat)).to(output.scalar_type());
  torch::autograd::backward({output}, {grad});
  Tensors results{output.detach()};
  for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

void expect_close(const Tensors& ours, const Tensors& reference, double tolerance) {
  ASSERT_EQ(ours.size(), reference.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i].sizes(), reference[i].sizes());
    EXPECT_EQ(ours[i].scalar_type(), reference[i].scalar_type());
    EXPECT_LE(error(ours[i], reference[i]), tolerance) << (i == 0 ? "output" : "gradient of input ") << i;
  }
}

// fp32 agrees to rounding; with bf16 inputs, bf16 outputs are equal to the bit and gradients within a few roundings of
// 2^-9.
void compare(const Operation& ours, const Operation& reference, const Tensors& inputs) {
  expect_close(run(ours, inputs), run(reference, inputs), 3e-6);
  Tensors rounded;
  for (const at::Tensor& input : inputs) rounded.push_back(input.to(at::kBFloat16));
  const Tensors a = run(ours, rounded);
  const Tensors b = run(reference, rounded);
  EXPECT_LE(error(a[0], b[0]), a[0].scalar_type() == at::kBFloat16 ? 0.0 : 3e-6);
  expect_close(a, b, 0x1p-6);
}

TEST(RmsNorm, EqualsItsReference) {
  for (const std::int64_t size : {2, 7, 64}) {
    compare([](const Tensors& in) { return rms_norm(in[0], in[1], 1e-5); },
            [](const Tensors& in) { return rms_norm_reference(in[0], in[1], 1e-5); },
            {random({2, 3, size}), random({size})});
  }
}

TEST(RmsNorm, OneElementKeepsItsSignAlone) {
  const Tensors results = run([](const Tensors& in) { return rms_norm(in[0], in[1], 1e-12); },
                              {at::tensor({-4.0f, 9.0f}).view({2, 1}), at::tensor({3.0f})});
  EXPECT_TRUE(at::allclose(results[0], at::tensor({-3.0f, 3.0f}).view({2, 1})));
  EXPECT_LE(results[1].abs().max().item<float>(), 1e-5);
}

TEST(RmsNorm, NormalisesToUnitMeanSquare) {
  const at::Tensor y = rms_norm(random({5, 128}) * 100, at::ones({128}), 0.0);
  EXPECT_LE(error(y.square().mean(-1), at::ones({5})), 1e-5);
}

TEST(RmsNorm, AFrozenWeightOrInputGetsNoGradient) {
  const at::Tensor x = random({3, 8}).requires_grad_();
  const at::Tensor weight = random({8});
  torch::autograd::backward({rms_norm(x, weight, 1e-5).sum()}, {});
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(weight.grad().defined());
  const at::Tensor y = x.detach();
  const at::Tensor trained = weight.clone().requires_grad_();
  torch::autograd::backward({rms_norm(y, trained, 1e-5).sum()}, {});
  EXPECT_TRUE(trained.grad().defined());
  EXPECT_FALSE(y.grad().defined());
}

TEST(SwiGlu, EqualsItsReference) {
  for (const std::int64_t size : {1, 5, 96}) {
    compare([](const Tensors& in) { return swiglu(in[0], in[1]); },
            [](const Tensors& in) { return swiglu_reference(in[0], in[1]); },
            {random({3, 2, size}) * 4, random({3, 2, size})});
  }
}

TEST(Attention, EqualsItsReferenceForEveryGrouping) {
  for (const std::int64_t kv_heads : {1, 2, 8}) {
    for (const std::int64_t tokens : {1, 2, 17}) {
      const Tensors inputs{random({2, tokens, 8, 6}), random({2, tokens, kv_heads, 6}),
                           random({2, tokens, kv_heads, 6})};
      const Operation ours = [](const Tensors& in) { return causal_attention(in[0], in[1], in[2]); };
      const Operation reference = [](const Tensors& in) { return causal_attention_reference(in[0], in[1], in[2]); };
      Tensors a = run(ours, inputs);
      Tensors b = run(reference, inputs);
      if (tokens == 1) {  // the softmax of one score is constant: the gradients of query and key are zero
        for (const Tensors& results : {a, b}) EXPECT_LE(results[1].abs().max().item<float>(), 1e-6);
        a = {a[0], a[3]};
        b = {b[0], b[3]};
      }
      expect_close(a, b, 1e-5);
    }
  }
}

TEST(Attention, NoTokenSeesTheFuture) {
  const at::Tensor query = random({1, 9, 4, 8});
  at::Tensor key = random({1, 9, 2, 8});
  at::Tensor value = random({1, 9, 2, 8});
  const at::Tensor before = causal_attention(query, key, value);
  key.narrow(1, 5, 4).fill_(3.0);
  value.narrow(1, 5, 4).fill_(-7.0);
  const at::Tensor after = causal_attention(query, key, value);
  EXPECT_TRUE(at::equal(before.narrow(1, 0, 5), after.narrow(1, 0, 5)));
  EXPECT_FALSE(at::equal(before.narrow(1, 5, 4), after.narrow(1, 5, 4)));
}

TEST(CrossEntropy, EqualsItsReference) {
  const at::Tensor labels = at::randint(0, 11, {13}, at::kLong);
  labels.narrow(0, 4, 3).fill_(kMaskedLabel);
  compare([&](const Tensors& in) { return cross_entropy_sum(in[0], labels); },
          [&](const Tensors& in) { return cross_entropy_sum_reference(in[0], labels); }, {random({13, 11}) * 5});
}

TEST(CrossEntropy, SeveralChunksEqualOne) {
  // 3 x 2^21 elements are two chunks, the second of them half full.
  const std::int64_t vocabulary = std::int64_t{1} << 21;
  const at::Tensor labels = at::randint(0, vocabulary, {3}, at::kLong);
  const Tensors inputs{random({3, vocabulary})};
  expect_close(run([&](const Tensors& in) { return cross_entropy_sum(in[0], labels); }, inputs),
               run([&](const Tensors& in) { return cross_entropy_sum_reference(in[0], labels); }, inputs), 1e-5);
}

TEST(CrossEntropy, UniformLogitsCostTheLogarithmOfTheVocabulary) {
  const at::Tensor loss = cross_entropy_sum(at::zeros({6, 50}, at::kBFloat16), at::arange(6));
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<float>(), 6 * std::log(50.0), 1e-4);
}

TEST(CrossEntropy, MaskedRowsCountForNothingWhateverTheyHold) {
  const at::Tensor labels = at::full({4}, kMaskedLabel, at::kLong);
  at::Tensor logits = random({4, 7});
  logits[1].fill_(std::numeric_limits<float>::infinity());
  logits[2].fill_(std::numeric_limits<float>::quiet_NaN());
  const Tensors all_masked = run([&](const Tensors& in) { return cross_entropy_sum(in[0], labels); }, {logits});
  EXPECT_EQ(all_masked[0].item<float>(), 0.0f);
  EXPECT_EQ(all_masked[1].abs().max().item<float>(), 0.0f);
}

TEST(CrossEntropy, EmptyAndOneTokenVocabularies) {
  EXPECT_EQ(cross_entropy_sum(at::empty({0, 5}), at::empty({0}, at::kLong)).item<float>(), 0.0f);
  EXPECT_EQ(cross_entropy_sum(random({3, 1}), at::zeros({3}, at::kLong)).item<float>(), 0.0f);
}

TEST(CrossEntropy, ALabelOutsideTheVocabularyThrows) {
  for (const std::int64_t label : {std::int64_t{5}, std::int64_t{-1}, std::int64_t{-101}}) {
    EXPECT_ANY_THROW(cross_entropy_sum(random({1, 5}), at::full({1}, label, at::kLong))) << label;
  }
}

TEST(Rotary, PlainFrequenciesArePowersOfTheta) {
  const at::Tensor frequencies = rotary_frequencies(model::preset("llama-tiny"));
  ASSERT_EQ(frequencies.numel(), 12);
  for (int i = 0; i < 12; ++i) {
    EXPECT_NEAR(frequencies[i].item<float>() * std::pow(10000.0, i / 12.0), 1.0, 1e-6) << i;
  }
}

TEST(Rotary, Llama3ScalingKeepsShortWavesAndStretchesLongOnes) {
  model::Dims dims = model::preset("llama3.1-8b");
  const at::Tensor scaled = rotary_frequencies(dims);
  dims.rope_scaling.reset();
  const at::Tensor plain = rotary_frequencies(dims);
  int between = 0;
  for (int i = 0; i < 64; ++i) {
    const double wave = 2 * std::numbers::pi / plain[i].item<float>();
    const double ratio = plain[i].item<float>() / scaled[i].item<float>();
    if (wave < 8192 / 4.0) {
      EXPECT_EQ(ratio, 1.0) << i;
    } else if (wave > 8192) {
      EXPECT_NEAR(ratio, 8.0, 1e-5) << i;
    } else {
      // 1 / ratio runs linearly in 8192 / wave from 1/8 at 1 to 1 at 4.
      EXPECT_NEAR(1 / ratio, 1.0 / 8 + (8192 / wave - 1) / 3 * (1 - 1.0 / 8), 1e-5) << i;
      ++between;
    }
  }
  EXPECT_GT(between, 0);
}

TEST(Rotary, TurnsElementIWithElementIPlusHalf) {
  const model::Dims dims = model::preset("llama-tiny");
  const RotaryTables tables = RotaryCache(dims).tables(10, at::kCPU, at::kFloat);
  const at::Tensor frequencies = rotary_frequencies(dims);
  const at::Tensor x = random({1, 10, 2, 24});
  const at::Tensor y = rotate(x, tables);
  for (int position = 0; position < 10; ++position) {
    for (int i = 0; i < 12; ++i) {
      const double angle = position * static_cast<double>(frequencies[i].item<float>());
      const double a = x[0][position][1][i].item<float>();
      const double b = x[0][position][1][i + 12].item<float>();
      EXPECT_NEAR(y[0][position][1][i].item<float>(), a * std::cos(angle) - b * std::sin(angle), 1e-5);
      EXPECT_NEAR(y[0][position][1][i + 12].item<float>(), a * std::sin(angle) + b * std::cos(angle), 1e-5);
    }
  }
}

TEST(Rotary, CachedTablesDoNotDependOnWhatWasAskedBefore) {
  const model::Dims dims = model::preset("llama-tiny");
  const RotaryCache cache(dims);
  const RotaryTables early = cache.tables(3, at::kCPU, at::kBFloat16);
  const at::Tensor kept = early.cos.clone();
  for (const std::int64_t tokens : {4, 1, 2048, 5}) {
    const RotaryTables fresh = RotaryCache(dims).tables(tokens, at::kCPU, at::kBFloat16);
    const RotaryTables cached = cache.tables(tokens, at::kCPU, at::kBFloat16);
    EXPECT_TRUE(at::equal(fresh.cos, cached.cos) && at::equal(fresh.sin, cached.sin)) << tokens;
    EXPECT_EQ(cached.cos.size(0), tokens);
  }
  EXPECT_TRUE(at::equal(early.cos, kept));
  EXPECT_EQ(cache.tables(2, at::kCPU, at::kFloat).sin.scalar_type(), at::kFloat);
  EXPECT_THROW(cache.tables(2049, at::kCPU, at::kFloat), base::UsageError);
}

TEST(Rotary, OneCacheServesThreads) {
  const model::Dims dims = model::preset("llama-tiny");
  const RotaryCache cache(dims);
  std::vector<int> right(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      for (int tokens = 1; tokens <= 64; ++tokens) {
        const RotaryTables tables = cache.tables(tokens + rank, at::kCPU, at::kFloat);
        right[rank] += tables.cos.size(0) == tokens + rank && tables.sin[0].abs().max().item<float>() == 0.0f;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, std::vector<int>(4, 64));
}

}  // namespace
}  // namespace fedshard::nn
