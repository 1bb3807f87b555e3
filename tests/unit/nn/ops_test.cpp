// Each operation against its plain reference and against numbers worked out by other means.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <thread>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/nn/ops/attention.h"
#include "fedshard/nn/ops/norm_linears.h"
#include "fedshard/nn/ops/rms_norm.h"
#include "fedshard/nn/ops/rotary.h"
#include "fedshard/nn/ops/swiglu_linear.h"
#include "tests/unit/nn/op_checks.h"

namespace fedshard::nn {
namespace {

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

// Outputs side by side, so that one gradient reaches all.
Operation norm_linears_of(bool recompute) {
  return [recompute](const Tensors& in) {
    return at::cat(norm_linears(in[0], in[1], 1e-5, Tensors(in.begin() + 2, in.end()), recompute), -1);
  };
}

TEST(NormLinears, EqualTheirReference) {
  const Operation reference = [](const Tensors& in) {
    return at::cat(norm_linears_reference(in[0], in[1], 1e-5, Tensors(in.begin() + 2, in.end())), -1);
  };
  for (const std::int64_t size : {2, 7, 64}) {
    compare(norm_linears_of(false), reference, {random({2, 3, size}), random({size}), random({5, size})});
    compare(norm_linears_of(true), reference,
            {random({2, 3, size}), random({size}), random({5, size}), random({1, size}), random({8, size})});
  }
}

TEST(NormLinears, RecomputingChangesNoBit) {
  const Tensors inputs{random({3, 11, 96}), random({96}), random({32, 96}), random({13, 96})};
  for (const Tensors& in : {inputs, rounded(inputs)}) {
    expect_equal(run(norm_linears_of(true), in), run(norm_linears_of(false), in));
  }
}

// Each input alone: it gets the gradient that it gets beside the others, and the others none.
void expect_frozen_inputs_left_alone(const Operation& operation, const Tensors& inputs) {
  const Tensors all = run(operation, inputs);
  for (std::size_t trained = 0; trained < inputs.size(); ++trained) {
    const Tensors one = run(
        [&](const Tensors& leaves) {
          Tensors mixed = inputs;
          mixed[trained] = leaves[0];
          const at::Tensor output = operation(mixed);
          return output;
        },
        {inputs[trained]});
    EXPECT_TRUE(at::equal(one[1], all[trained + 1])) << trained;
    for (const at::Tensor& input : inputs) EXPECT_FALSE(input.grad().defined());
  }
}

TEST(NormLinears, FrozenInputsGetNoGradient) {
  expect_frozen_inputs_left_alone(norm_linears_of(true), {random({4, 6}), random({6}), random({3, 6}), random({2, 6})});
}

TEST(SwiGluLinear, EqualsItsReference) {
  for (const bool recompute : {false, true}) {
    for (const std::int64_t size : {1, 5, 96}) {
      compare([&](const Tensors& in) { return swiglu_linear(in[0], in[1], in[2], recompute); },
              [](const Tensors& in) { return swiglu_linear_reference(in[0], in[1], in[2]); },
              {random({3, 2, size}) * 4, random({3, 2, size}), random({7, size})});
    }
  }
}

TEST(SwiGluLinear, RecomputingChangesNoBit) {
  const Tensors inputs{random({3, 11, 96}), random({3, 11, 96}), random({32, 96})};
  const auto of = [](bool recompute) -> Operation {
    return [recompute](const Tensors& in) { return swiglu_linear(in[0], in[1], in[2], recompute); };
  };
  for (const Tensors& in : {inputs, rounded(inputs)}) expect_equal(run(of(true), in), run(of(false), in));
}

TEST(SwiGluLinear, FrozenInputsGetNoGradient) {
  expect_frozen_inputs_left_alone([](const Tensors& in) { return swiglu_linear(in[0], in[1], in[2], true); },
                                  {random({4, 6}), random({4, 6}), random({3, 6})});
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

// Rows of 9 tokens with 2 + 7, 9 and 1 + 1 + 4 + 3.
TEST(Attention, DocumentsAreWhatTheyAreAlone) {
  const std::vector<std::int64_t> documents{2, 7, 9, 1, 1, 4, 3};
  model::Dims dims = model::preset("llama-tiny");
  const RotaryTables tables = RotaryCache(dims).tables(9, at::kCPU, at::kFloat);
  for (const std::int64_t kv_heads : {1, 2, 4}) {
    const Tensors inputs{random({3, 9, 4, 24}), random({3, 9, kv_heads, 24}), random({3, 9, kv_heads, 24})};
    const Operation packed = [&](const Tensors& in) {
      return document_attention(in[0], in[1], in[2], tables, documents);
    };
    const Operation alone = [&](const Tensors& in) {
      Tensors parts;
      std::int64_t first = 0;
      for (const std::int64_t length : documents) {
        const auto part = [&](const at::Tensor& x) { return x.flatten(0, 1).narrow(0, first, length).unsqueeze(0); };
        const RotaryTables start{tables.cos.narrow(0, 0, length), tables.sin.narrow(0, 0, length)};
        parts.push_back(
            causal_attention_reference(rotate(part(in[0]), start), rotate(part(in[1]), start), part(in[2])));
        first += length;
      }
      return at::cat(parts, 1).view(in[0].sizes());
    };
    expect_close(run(packed, inputs), run(alone, inputs), 3e-6);
  }
}

TEST(Attention, RowsOfOneDocumentNeedNoLengths) {
  model::Dims dims = model::preset("llama-tiny");
  const RotaryTables tables = RotaryCache(dims).tables(20, at::kCPU, at::kFloat);
  const Tensors inputs{random({2, 5, 4, 24}), random({2, 5, 2, 24}), random({2, 5, 2, 24})};
  const auto of = [&](const std::vector<std::int64_t>& documents) -> Operation {
    return
        [&tables, documents](const Tensors& in) { return document_attention(in[0], in[1], in[2], tables, documents); };
  };
  expect_close(run(of({}), inputs), run(of({5, 5}), inputs), 1e-6);
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
