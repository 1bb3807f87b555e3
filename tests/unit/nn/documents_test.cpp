// Packed, padded and masked batches: what a token's loss and gradients may depend on.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "fedshard/base/error.h"
#include "tests/unit/nn/llama_runs.h"

namespace fedshard::nn {
namespace {

using Lengths = std::vector<std::int64_t>;

double error(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item<double>();
}

// The sum of the batches' losses and of their gradients.
struct Total {
  double loss = 0;
  Units units;
};

Total run_all(const model::Dims& dims, const std::vector<MicroBatch>& batches) {
  const Model model = make_llama(dims);
  Total total{0, make_units(model, at::kFloat)};
  for (const MicroBatch& batch : batches) total.loss += run_detached(model, total.units, batch).item<double>();
  return total;
}

void expect_same(const Total& a, const Total& b, double tolerance) {
  EXPECT_NEAR(a.loss / b.loss, 1.0, tolerance);
  for (std::size_t u = 0; u < a.units.size(); ++u) {
    for (std::size_t i = 0; i < a.units[u].size(); ++i) {
      EXPECT_LE(error(a.units[u][i].grad(), b.units[u][i].grad()), tolerance) << "unit " << u << ", parameter " << i;
    }
  }
}

// Documents of these lengths in rows of `tokens`; each ends within a row.
at::Tensor documents_of(const Lengths& lengths, std::int64_t tokens) {
  const at::Tensor repeats = at::tensor(lengths, at::kLong);
  return at::repeat_interleave(repeats).view({-1, tokens});
}

TEST(Documents, APackedRowIsItsDocumentsAlone) {
  const Lengths lengths{5, 1, 17, 1, 23, 1};  // two rows of 24
  for (const bool tied : {false, true}) {
    model::Dims dims = small(tied);
    for (const std::int64_t kv_heads : {1, 2, 4}) {
      dims.num_key_value_heads = kv_heads;
      MicroBatch packed = make_batch(2, 24);
      packed.documents = documents_of(lengths, 24);
      std::vector<MicroBatch> alone;
      std::int64_t first = 0;
      for (const std::int64_t length : lengths) {
        const auto part = [&](const at::Tensor& x) { return x.flatten().narrow(0, first, length).view({1, length}); };
        alone.push_back({part(packed.tokens), part(packed.labels)});
        first += length;
      }
      expect_same(run_all(dims, {packed}), run_all(dims, alone), 1e-6);
    }
  }
}

TEST(Documents, OneDocumentARowIsTheDefault) {
  MicroBatch batch = make_batch(3, 11);
  const Total without = run_all(small(false), {batch});
  batch.documents = at::full({3, 11}, 4, at::kLong);
  expect_same(run_all(small(false), {batch}), without, 1e-6);
}

// Document B's loss does not change when document A does.
TEST(Documents, OneDocumentDoesNotReachAnother) {
  const Model model = make_llama(small(false));
  const Units units = make_units(model, at::kFloat);
  MicroBatch batch = make_batch(1, 20);
  batch.documents = documents_of({9, 11}, 20);
  batch.labels.narrow(1, 0, 9).fill_(-100);
  const float before = run_detached(model, units, batch).item<float>();
  batch.tokens.narrow(1, 0, 9).copy_(at::randint(0, 320, {1, 9}, at::kLong));
  EXPECT_EQ(run_detached(model, units, batch).item<float>(), before);
  batch.documents.reset();
  EXPECT_NE(run_detached(model, units, batch).item<float>(), before);
}

TEST(Documents, ARowMayBeLongerThanTheModelsPositions) {
  model::Dims dims = small(false);
  dims.max_position_embeddings = 8;
  const Model model = make_llama(dims);
  const Units units = make_units(model, at::kFloat);
  MicroBatch batch = make_batch(1, 20);
  batch.documents = documents_of({8, 5, 7}, 20);
  EXPECT_TRUE(std::isfinite(run_detached(model, units, batch).item<float>()));
  batch.documents = documents_of({9, 4, 7}, 20);
  EXPECT_THROW(run_detached(model, units, batch), base::UsageError);
}

TEST(Documents, LengthsFollowTheIndex) {
  const auto lengths_of = [](const at::Tensor& documents) {
    return document_lengths({at::zeros_like(documents), {}, documents});
  };
  EXPECT_EQ(document_lengths({at::zeros({2, 3}, at::kLong), {}}), Lengths{});
  EXPECT_EQ(lengths_of(at::tensor({0, 0, 1, 1, 1, 5}, at::kLong).view({2, 3})), (Lengths{2, 1, 2, 1}));
  EXPECT_EQ(lengths_of(at::tensor({7, 3}, at::kLong).view({2, 1})), (Lengths{1, 1}));
  EXPECT_EQ(lengths_of(at::zeros({0, 4}, at::kLong)), Lengths{});
  EXPECT_THROW(lengths_of(at::tensor({0, 1, 0}, at::kLong).view({1, 3})), base::RunError);
  EXPECT_THROW(lengths_of(at::zeros({1, 3}, at::kInt)), base::RunError);
  EXPECT_THROW(document_lengths({at::zeros({1, 4}, at::kLong), {}, at::zeros({1, 3}, at::kLong)}), base::RunError);
}

TEST(Documents, EndOfTextEndsItsDocument) {
  const at::Tensor ids = at::tensor({1, 9, 2, 3, 9, 9, 4, 9, 5, 6, 7, 8, 2, 9}, at::kInt).view({2, 7});
  const MicroBatch batch = micro_batch_of(ids, 9);
  const MicroBatch plain = micro_batch_of(ids);
  EXPECT_TRUE(at::equal(batch.tokens, plain.tokens) && at::equal(batch.labels, plain.labels));
  EXPECT_FALSE(plain.documents.defined());
  const at::Tensor expected = at::tensor({0, 0, 1, 1, 1, 2, 0, 1, 1, 1, 1, 1}, at::kLong).view({2, 6});
  EXPECT_TRUE(at::equal(batch.documents, expected));
  EXPECT_EQ(document_lengths(batch), (Lengths{2, 3, 1, 1, 5}));
}

TEST(Padding, MaskedPaddingChangesNothing) {
  for (const bool tied : {false, true}) {
    const MicroBatch batch = make_batch(2, 13);
    const auto padded_with = [&](const at::Tensor& x, std::int64_t value) {
      return at::constant_pad_nd(x, {0, 6}, value);
    };
    const MicroBatch padded{padded_with(batch.tokens, 0), padded_with(batch.labels, -100)};
    expect_same(run_all(small(tied), {padded}), run_all(small(tied), {batch}), 1e-6);
  }
}

TEST(Padding, AnAllMaskedBatchHasNoLossAndNoGradient) {
  MicroBatch batch = make_batch(2, 13);
  batch.labels.fill_(-100);
  for (const bool tied : {false, true}) {
    const Total total = run_all(small(tied), {batch});
    EXPECT_EQ(total.loss, 0.0);
    for (const auto& unit : total.units) {
      for (const at::Tensor& p : unit) EXPECT_EQ(p.grad().abs().max().item<float>(), 0.0f);
    }
  }
}

}  // namespace
}  // namespace fedshard::nn
