// The chunked head against its reference, at every chunk size.
#include "fedshard/nn/ops/linear_cross_entropy.h"

#include <c10/core/GradMode.h>

#include <array>
#include <cmath>
#include <limits>

#include "fedshard/base/error.h"
#include "tests/support/memory_meter.h"
#include "tests/unit/nn/op_checks.h"

namespace fedshard::nn {
namespace {

at::Tensor labels_of(std::int64_t rows, std::int64_t vocabulary) {
  return at::randint(0, vocabulary, {rows}, at::kLong);
}

Operation ours(const at::Tensor& labels, std::int64_t chunk_rows) {
  return [labels, chunk_rows](const Tensors& in) { return linear_cross_entropy_sum(in[0], in[1], labels, chunk_rows); };
}

Operation reference(const at::Tensor& labels) {
  return [labels](const Tensors& in) { return linear_cross_entropy_sum_reference(in[0], in[1], labels); };
}

TEST(LinearCrossEntropy, EqualsItsReferenceAtEveryChunkSize) {
  for (const auto& [rows, vocabulary, hidden] : {std::array<std::int64_t, 3>{13, 11, 6}, {1, 17, 5}, {64, 101, 3}}) {
    const Tensors inputs{random({rows, hidden}) * 2, random({vocabulary, hidden})};
    for (const bool masked : {false, true}) {
      const at::Tensor labels = labels_of(rows, vocabulary);
      if (masked) labels.slice(0, 1, rows, 3).fill_(kMaskedLabel);
      for (const std::int64_t chunk : {1, 2, 5, 13, 1000}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << vocabulary << ", chunks of " << chunk << " masked "
                                        << masked);
        compare(ours(labels, chunk), reference(labels), inputs);
      }
    }
  }
}

// Adding one number at a time in bf16 would stop at 256 times the addend's size.
TEST(LinearCrossEntropy, TheTablesGradientIsSummedInFp32) {
  const std::int64_t rows = 2000;
  const Tensors inputs = rounded({at::ones({rows, 4}), random({3, 4})});
  const at::Tensor labels = at::zeros({rows}, at::kLong);
  at::Tensor table = inputs[1].detach().clone().requires_grad_();
  torch::autograd::impl::materialize_autograd_meta(table)->set_grad_dtype(at::kFloat, table);
  torch::autograd::backward({linear_cross_entropy_sum(inputs[0], table, labels, 1)}, {});
  ASSERT_EQ(table.grad().scalar_type(), at::kFloat);
  const Tensors wide = run(reference(labels), {inputs[0].to(at::kFloat), inputs[1].to(at::kFloat)});
  at::manual_seed(3);
  EXPECT_LE(error(table.grad() * at::randn({}), wide[2]), 0x1p-7);
  // Not rounded to bf16 on its way out.
  EXPECT_FALSE(at::equal(table.grad(), table.grad().to(at::kBFloat16).to(at::kFloat)));
}

// A third is not a bf16 number: rounded as a factor, it would change every gradient's size by 2^-9.
TEST(LinearCrossEntropy, BackwardMultipliesByTheExactScale) {
  const at::Tensor labels = labels_of(64, 37);
  const Tensors inputs{random({64, 32}), random({37, 32})};
  for (const Tensors& in : {inputs, rounded(inputs)}) {
    const Tensors whole = run(ours(labels, 20), in);
    const Tensors third = run([&](const Tensors& x) { return ours(labels, 20)(x) / 3.0; }, in);
    for (const int i : {1, 2}) {
      const at::Tensor reference = whole[i].to(at::kDouble);
      const double ratio = ((third[i].to(at::kDouble) * reference).sum() / reference.square().sum()).item<double>();
      EXPECT_NEAR(ratio * 3, 1.0, in[0].scalar_type() == at::kFloat ? 1e-6 : 0x1p-11);
    }
  }
}

TEST(LinearCrossEntropy, UniformLogitsCostTheLogarithmOfTheVocabulary) {
  const at::Tensor loss =
      linear_cross_entropy_sum(at::zeros({6, 3}, at::kBFloat16), at::ones({50, 3}, at::kBFloat16), at::arange(6), 4);
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<float>(), 6 * std::log(50.0), 1e-4);
}

TEST(LinearCrossEntropy, LargeLogitsDoNotOverflow) {
  const Tensors inputs{at::full({2, 1}, 1e4), at::tensor({1.0f, -1.0f, 0.5f}).view({3, 1})};
  const at::Tensor labels = at::tensor({0, 1}, at::kLong);
  const Tensors results = run(ours(labels, 1), inputs);
  EXPECT_EQ(results[0].item<float>(), 2e4f);
  EXPECT_TRUE(at::isfinite(results[1]).all().item<bool>());
}

TEST(LinearCrossEntropy, MaskedRowsCountForNothingWhateverTheyHold) {
  at::Tensor hidden = random({5, 7});
  hidden[1].fill_(std::numeric_limits<float>::infinity());
  hidden[3].fill_(std::numeric_limits<float>::quiet_NaN());
  const at::Tensor table = random({9, 7});
  at::Tensor labels = labels_of(5, 9);
  labels[1] = labels[3] = kMaskedLabel;
  const Tensors some = run(ours(labels, 2), {hidden, table});
  const at::Tensor kept = at::tensor({0, 2, 4}, at::kLong);
  const Tensors without = run(ours(labels.index_select(0, kept), 2), {hidden.index_select(0, kept), table});
  EXPECT_TRUE(at::equal(some[0], without[0]));
  EXPECT_LE(error(some[1].index_select(0, kept), without[1]), 1e-6);
  EXPECT_LE(error(some[2], without[2]), 1e-6);
  EXPECT_EQ(some[1].index_select(0, at::tensor({1, 3}, at::kLong)).abs().max().item<float>(), 0.0f);

  const Tensors none = run(ours(at::full({5}, kMaskedLabel, at::kLong), 2), {hidden, table});
  EXPECT_EQ(none[0].item<float>(), 0.0f);
  for (const int i : {1, 2}) EXPECT_EQ(none[i].abs().max().item<float>(), 0.0f);
}

TEST(LinearCrossEntropy, EmptyAndOneTokenVocabularies) {
  const Tensors empty = run(ours(at::empty({0}, at::kLong), 3), {at::empty({0, 5}), random({4, 5})});
  EXPECT_EQ(empty[0].item<float>(), 0.0f);
  EXPECT_EQ(empty[2].abs().max().item<float>(), 0.0f);
  EXPECT_EQ(linear_cross_entropy_sum(random({3, 2}), random({1, 2}), at::zeros({3}, at::kLong), 2).item<float>(), 0.0f);
}

TEST(LinearCrossEntropy, FrozenInputsGetNoGradientAndNoMemory) {
  const at::Tensor labels = labels_of(6, 500);
  const at::Tensor hidden = random({6, 64}), table = random({500, 64});
  const Tensors both = run(ours(labels, 4), {hidden, table});
  at::Tensor leaf = hidden.clone().requires_grad_();
  {
    const testing_support::MemoryMeter meter;
    const at::Tensor loss = linear_cross_entropy_sum(leaf, table, labels, 4);
    EXPECT_EQ(meter.live(), 6 * 64 * 4 + 4);
    torch::autograd::backward({loss}, {});
  }
  EXPECT_FALSE(table.grad().defined());
  at::manual_seed(3);
  EXPECT_LE(error(leaf.grad() * at::randn({}), both[1]), 1e-6);
  at::Tensor trained = table.clone().requires_grad_();
  torch::autograd::backward({linear_cross_entropy_sum(hidden, trained, labels, 4)}, {});
  at::manual_seed(3);
  EXPECT_LE(error(trained.grad() * at::randn({}), both[2]), 1e-6);
  EXPECT_FALSE(hidden.grad().defined());
}

TEST(LinearCrossEntropy, WithoutGradModeNothingIsKeptAndTheLossIsTheSame) {
  const at::Tensor labels = labels_of(40, 500);
  const at::Tensor hidden = random({40, 64}).requires_grad_(), table = random({500, 64}).requires_grad_();
  const at::Tensor with = linear_cross_entropy_sum(hidden, table, labels, 4);
  const c10::NoGradGuard no_grad;
  const testing_support::MemoryMeter meter;
  const at::Tensor without = linear_cross_entropy_sum(hidden, table, labels, 4);
  EXPECT_EQ(meter.live(), 4);
  EXPECT_LT(meter.peak(), 500 * 64 * 4) << "no gradient of the table";
  EXPECT_EQ(with.item<float>(), without.item<float>());
}

TEST(LinearCrossEntropy, RefusesWhatItCannotCompute) {
  for (const std::int64_t label : {std::int64_t{5}, std::int64_t{-1}, std::int64_t{-101}}) {
    EXPECT_ANY_THROW(linear_cross_entropy_sum(random({1, 2}), random({5, 2}), at::full({1}, label, at::kLong), 1))
        << label;
  }
  EXPECT_THROW(linear_cross_entropy_sum(random({1, 2}), random({5, 2}), labels_of(1, 5), 0), base::RunError);
  const at::Tensor hidden = random({1, 2}).requires_grad_();
  const at::Tensor loss = linear_cross_entropy_sum(hidden, random({5, 2}), labels_of(1, 5), 1);
  torch::autograd::backward({loss}, {}, /*retain_graph=*/true);
  EXPECT_THROW(torch::autograd::backward({loss}, {}), base::RunError);
}

}  // namespace
}  // namespace fedshard::nn
