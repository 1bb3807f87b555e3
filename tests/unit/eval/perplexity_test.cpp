#include "fedshard/eval/perplexity.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <mutex>
#include <optional>

#include "fedshard/data/tokenizer.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::eval {
namespace {

constexpr std::int64_t kLength = 5;
constexpr int kVocab = 257;  // of the byte tokenizer

// A data set of one document of random bytes, cut into `sequences` windows.
class Sequences {
 public:
  explicit Sequences(std::int64_t sequences) {
    const data::ByteTokenizer tokenizer;
    data::TokenFileWriter writer(path_, tokenizer);
    std::mt19937 random(5);
    for (std::int64_t i = 0; i < sequences * kLength; ++i) ids_.push_back(static_cast<std::int32_t>(random() % 256));
    writer.add_document(ids_);
    writer.finish(0);
    ids_.push_back(tokenizer.end_of_text());
    dataset_.emplace(std::vector{path_}, kLength);
  }
  ~Sequences() { std::filesystem::remove(path_); }
  Sequences(const Sequences&) = delete;
  Sequences& operator=(const Sequences&) = delete;

  const data::TokenDataset& dataset() const { return *dataset_; }

  // The first `count` sequences as one batch.
  nn::MicroBatch batch(std::int64_t count) const {
    const at::Tensor ids = at::tensor(ids_).to(at::kLong);
    return {ids.narrow(0, 0, count * kLength).view({count, kLength}).contiguous(),
            ids.narrow(0, 1, count * kLength).view({count, kLength}).contiguous()};
  }

 private:
  std::filesystem::path path_ =
      std::filesystem::path(testing::TempDir()) / ("fedshard-eval-" + std::to_string(::getpid()) + ".tokens");
  std::vector<std::int32_t> ids_;
  std::optional<data::TokenDataset> dataset_;
};

void fill(shard::Engine& engine) {
  engine.fill([&](int unit, topology::Range range, std::span<float> out) {
    const std::int64_t base = engine.plan().global_offset(unit);
    for (std::int64_t i = range.begin; i < range.end; ++i) out[i - range.begin] = testing_support::tiny_value(base + i);
  });
}

// What all ranks of the layout get; they must agree to the bit.
EvalResult evaluate_on(const nn::Model& model, const Sequences& sequences, int world,
                       const topology::LayoutOptions& options, const EvalOptions& eval_options) {
  const auto layout = topology::Layout::make(world, options);
  std::mutex mutex;
  std::optional<EvalResult> result;
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const topology::Coordinates at = layout.at(rank);
    shard::StateRegistry registry;
    shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {}, registry);
    fill(engine);
    const EvalResult mine =
        sum_over_world(axes, evaluate(engine, engine.parameters(), sequences.dataset(), world, rank, eval_options));
    const std::lock_guard lock(mutex);
    if (!result) result = mine;
    EXPECT_EQ(mine.loss, result->loss);
    EXPECT_EQ(mine.tokens, result->tokens);
  });
  return *result;
}

struct Place {
  int world = 1;
  topology::LayoutOptions options;
};

std::vector<Place> layouts_of_four() {
  return {{4, {.groups = 1}},
          {4, {.groups = 1, .shard_degree = 1, .replicate_degree = 4}},
          {4, {.groups = 1, .shard_degree = 2, .replicate_degree = 2}},
          {4, {.groups = 2}},
          {4, {.groups = 4}}};
}

// Three sequences on four ranks: one rank has nothing but still takes part in every gather.
TEST(Perplexity, OfFewerSequencesThanRanksIsThatOfOneRank) {
  const Sequences sequences(3);
  const nn::Model model = testing_support::tiny_model({.vocab = kVocab});
  const double expected = testing_support::TinyReference(model).backward(sequences.batch(3));
  const EvalResult one = evaluate_on(model, sequences, 1, {}, {});
  EXPECT_EQ(one.tokens, 3 * kLength);
  EXPECT_NEAR(one.loss, expected, 1e-6 * expected);
  EXPECT_DOUBLE_EQ(one.perplexity(), std::exp(one.loss));
  for (const Place& place : layouts_of_four()) {
    for (const std::int64_t batch : {1, 2, 7}) {
      const EvalResult four = evaluate_on(model, sequences, place.world, place.options, {.batch = batch});
      EXPECT_EQ(four.tokens, one.tokens);
      EXPECT_NEAR(four.loss, one.loss, 1e-6 * one.loss) << "batch " << batch;
    }
  }
}

TEST(Perplexity, DoesNotDependOnTheBatch) {
  const Sequences sequences(11);
  const nn::Model model = testing_support::tiny_model({.vocab = kVocab, .tied = true});
  const double expected = testing_support::TinyReference(model).backward(sequences.batch(11));
  for (const std::int64_t batch : {1, 2, 3, 11, 16}) {
    for (const int world : {1, 2, 3}) {
      const EvalResult result = evaluate_on(model, sequences, world, {}, {.batch = batch});
      EXPECT_EQ(result.tokens, 11 * kLength);
      EXPECT_NEAR(result.loss, expected, 1e-6 * expected) << "batch " << batch << " on " << world;
    }
  }
}

TEST(Perplexity, OfSomePassesIsOfTheSameSequencesOnOneRankAndOnFour) {
  const Sequences sequences(11);
  const nn::Model model = testing_support::tiny_model({.vocab = kVocab});
  for (const std::int64_t passes : {1, 2, 3, 100}) {
    const std::int64_t count = std::min<std::int64_t>(11, 4 * passes);
    const double expected = testing_support::TinyReference(model).backward(sequences.batch(count));
    const EvalResult one = evaluate_on(model, sequences, 1, {}, {.batch = 4, .max_passes = passes});
    EXPECT_EQ(one.tokens, count * kLength);
    EXPECT_NEAR(one.loss, expected, 1e-6 * expected) << passes << " passes";
    for (const Place& place : layouts_of_four()) {
      const EvalResult four =
          evaluate_on(model, sequences, place.world, place.options, {.batch = 1, .max_passes = passes});
      EXPECT_EQ(four.tokens, one.tokens);
      EXPECT_NEAR(four.loss, one.loss, 1e-6 * one.loss) << passes << " passes";
    }
  }
}

// A model whose loss at a position is the label itself: sums are whole numbers, so the result must be exact, and a mean
// of means or a counted padding would show.
nn::Model labels_as_losses() {
  nn::Model model;
  model.plan.units = {{"first", {{"a", {3}, {}}}}, {"last", {{"b", {1}, {}}}}};
  model.plan.stages = {{"first", {0}}, {"last", {1}}};
  model.stages.push_back(
      [](nn::Parameters, const at::Tensor&, const nn::MicroBatch& batch) { return batch.tokens.to(at::kFloat); });
  model.stages.push_back([](nn::Parameters, const at::Tensor&, const nn::MicroBatch& batch) {
    return batch.labels.clamp_min(0).sum().to(at::kFloat);
  });
  return model;
}

TEST(Perplexity, IsTheSumOfLossesOverTheSumOfTokens) {
  const nn::Model model = labels_as_losses();
  for (const std::int64_t count : {1, 2, 3, 4, 5, 13}) {
    const Sequences sequences(count);
    const double expected = sequences.batch(count).labels.sum().item<double>() / static_cast<double>(count * kLength);
    for (const Place& place : layouts_of_four()) {
      for (const std::int64_t batch : {1, 2, 5}) {
        const EvalResult result = evaluate_on(model, sequences, place.world, place.options, {.batch = batch});
        EXPECT_EQ(result.tokens, count * kLength);
        EXPECT_EQ(result.loss, expected) << count << " sequences in batches of " << batch;
      }
    }
  }
}

TEST(Perplexity, ReadsTheParametersItIsGivenAndChangesNone) {
  const Sequences sequences(4);
  const nn::Model model = testing_support::tiny_model({.vocab = kVocab});
  testing_support::on_ranks(topology::Layout::make(2, {}), [&](int rank, comm::Axes& axes) {
    shard::StateRegistry registry;
    shard::Engine engine(model, 2, rank, axes, {}, registry);
    fill(engine);
    const shard::Arena zeros(engine.map());
    const at::Tensor before = engine.parameters().flat().clone();
    // With parameters of zero all tokens are equally likely.
    const shard::LossSum sum = evaluate(engine, zeros, sequences.dataset(), 2, rank, {});
    EXPECT_NEAR(sum_over_world(axes, sum).loss, std::log(kVocab), 1e-6);
    EXPECT_TRUE(at::equal(engine.parameters().flat(), before));
    EXPECT_EQ(zeros.flat().abs().sum().item<double>(), 0);
  });
}

}  // namespace
}  // namespace fedshard::eval
