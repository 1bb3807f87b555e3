// Every combination of layout, accumulation, resharding, activation checkpointing, prefetch, clipping and tying trains
// a Llama to the same losses and norms as one process without sharding.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "fedshard/nn/llama.h"
#include "fedshard/shard/engine.h"
#include "tests/support/rank_threads.h"
#include "tests/support/sanitized.h"
#include "tests/support/tiny_model.h"

namespace fedshard::shard {
namespace {

using model::ActivationCheckpoint;
using testing_support::held_of;
using testing_support::tiny_batch;

constexpr std::int64_t kLength = 3;
constexpr int kSteps = 5;
constexpr int kSequences = 36;  // of a step: divisible by up to four ranks times three micro-steps
constexpr double kLr = 0.2;
constexpr double kMaxNorm = 0.05;

model::Dims dims_of(bool tied) {
  model::Dims dims;
  dims.hidden_size = 6;
  dims.intermediate_size = 7;
  dims.num_hidden_layers = 2;
  dims.num_attention_heads = 3;
  dims.num_key_value_heads = 1;
  dims.vocab_size = 13;
  dims.max_position_embeddings = 8;
  dims.tie_word_embeddings = tied;
  return dims;
}

struct Expected {
  double loss = 0, norm = 0;
};

struct Reference {
  std::vector<Expected> steps;
  at::Tensor parameters;  // at the end
};

Reference reference_of(const model::Dims& dims, double max_norm) {
  const nn::Model model = nn::make_llama(dims);
  testing_support::TinyReference whole(model);
  Reference result;
  for (int step = 0; step < kSteps; ++step) {
    Expected e{whole.backward(tiny_batch(step * kSequences, kSequences, kLength, 13)), 0};
    e.norm = whole.flat(true).to(at::kDouble).norm().item<double>();
    whole.descend(kLr * (max_norm > 0 ? std::min(1.0, max_norm / (e.norm + 1e-6)) : 1.0));
    result.steps.push_back(e);
  }
  result.parameters = whole.flat(false);
  return result;
}

struct Case {
  int shards, replicas;
  plan::ScheduleOptions schedule;
  ActivationCheckpoint checkpoint;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "F" << c.shards << " R" << c.replicas << " A" << c.schedule.micro_steps << " prefetch "
             << c.schedule.prefetch << (c.schedule.reshard_after_forward ? " reshard" : " keep") << " checkpoint "
             << static_cast<int>(c.checkpoint) << (c.schedule.reduce_each_micro_step ? "" : " reduce last");
}

void expect_trains_like(const Case& c, const model::Dims& dims, double max_norm, const Reference& reference) {
  SCOPED_TRACE(testing::PrintToString(c));
  const nn::Model model = nn::make_llama(dims, {c.checkpoint});
  const int ranks = c.shards * c.replicas, micro = kSequences / ranks / c.schedule.micro_steps;
  const auto layout = topology::Layout::make(ranks, {.shard_degree = c.shards, .replicate_degree = c.replicas});
  std::mutex checks;
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, c.shards, layout.at(rank).shard, axes, {{}, c.schedule, max_norm}, registry);
    engine.fill(testing_support::tiny_filler(engine.plan()));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<nn::MicroBatch> batches;
      for (int m = 0; m < c.schedule.micro_steps; ++m) {
        const int first = step * kSequences + (rank * c.schedule.micro_steps + m) * micro;
        batches.push_back(tiny_batch(first, micro, kLength, 13));
      }
      const StepResult result = engine.step(batches, [&](int u) {
        const c10::NoGradGuard no_grad;
        engine.parameters().unit(u).sub_(engine.gradients().unit(u), kLr);
      });
      const std::lock_guard lock(checks);
      EXPECT_NEAR(result.loss, reference.steps[step].loss, 1e-5 * reference.steps[step].loss) << c << ", step " << step;
      EXPECT_NEAR(result.grad_norm, reference.steps[step].norm, 5e-5 * reference.steps[step].norm)
          << c << ", step " << step;
    }
    const std::lock_guard lock(checks);
    for (int u = 0; u < engine.map().units(); ++u) {
      const at::Tensor right = held_of(model.plan, u, engine.map().range(u), reference.parameters);
      if (right.numel() == 0) continue;
      EXPECT_LE((engine.parameters().real(u) - right).abs().max().item<double>(), 2e-5) << c;
    }
  });
}

class Matrix : public testing::TestWithParam<std::tuple<bool, bool>> {};

TEST_P(Matrix, EqualsOneProcess) {
  const auto [tied, clips] = GetParam();
  const model::Dims dims = dims_of(tied);
  const double max_norm = clips ? kMaxNorm : 0.0;
  const Reference reference = reference_of(dims, max_norm);
  int cases = 0;
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 1}, {2, 2}, {1, 4}}) {
    for (const int micro_steps : {1, 3}) {
      for (const bool reshard : {false, true}) {
        for (const auto mode :
             {ActivationCheckpoint::none, ActivationCheckpoint::selective, ActivationCheckpoint::full}) {
          for (const int prefetch : {0, 1, 2}) {
            if (testing_support::kSanitized && prefetch != 1) continue;
            plan::ScheduleOptions schedule{micro_steps, reshard, prefetch, mode == ActivationCheckpoint::full};
            schedule.reduce_each_micro_step = prefetch != 1 || !reshard;
            expect_trains_like({shards, replicas, schedule, mode}, dims, max_norm, reference);
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_EQ(cases, 6 * 2 * 2 * 3 * (testing_support::kSanitized ? 1 : 3));
}

INSTANTIATE_TEST_SUITE_P(TiedAndClipped, Matrix, testing::Combine(testing::Bool(), testing::Bool()));

}  // namespace
}  // namespace fedshard::shard
