// Groups that are updated by one gradient stay one model, their optimizers' state included.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "fedshard/base/error.h"
#include "fedshard/federation/synchronous.h"
#include "fedshard/optim/optimizer.h"
#include "fedshard/shard/digest.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::train {
namespace {

using testing_support::on_ranks;
using testing_support::tiny_batch;

constexpr int kSteps = 8;

// By state, the digest that all ranks agree on after some steps. `together`: whether gradients are summed over groups.
std::vector<std::uint64_t> digests_after_steps(const topology::Layout& layout, plan::Update update, bool together,
                                               at::ScalarType master = at::kFloat) {
  const nn::Model model = testing_support::tiny_model({});
  std::mutex mutex;
  std::vector<std::uint64_t> digests;
  on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const topology::Coordinates at = layout.at(rank);
    shard::StateRegistry registry;
    shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {{.master = master}, {}, 0.05},
                         registry);
    engine.fill(testing_support::tiny_filler(engine.plan()));
    optim::OptimizerOptions options;
    options.updates.update = update;
    options.updates.weight_decay = 0.1;
    options.momentum = 0.9;
    const auto optimizer = optim::make_optimizer(options, engine, axes, registry);
    federation::Exchange exchange(layout, rank, engine.plan(), engine.map(), axes);
    shard::GradientHooks hooks;
    if (together) {
      hooks.sum_over_groups = [&](const auto& sums, const auto& of_group) {
        return federation::sum_over_groups(exchange, axes, sums, of_group);
      };
    }
    for (int step = 1; step <= kSteps; ++step) {
      const nn::MicroBatch batch = tiny_batch(step * layout.world() + rank, 1, 6, 11);
      engine.step(
          {&batch, 1}, [&](int unit) { optimizer->step(unit, step, 0.01); }, hooks);
    }
    for (const shard::State& state : registry.all()) {
      if (!state.arena->map().is_whole()) continue;  // Muon's second moment; what it leads to is a parameter
      const std::uint64_t digest = shard::agreed_digest(engine.plan(), *state.arena, axes);
      if (rank > 0) continue;
      const std::lock_guard lock(mutex);
      digests.push_back(digest);
    }
  });
  return digests;
}

TEST(WarmUp, GroupsHoldTheSameParametersAndMomentsToTheBit) {
  const std::vector<topology::Layout> same_shards = {
      topology::Layout::make(3, {.groups = 3}), topology::Layout::make(6, {.groups = 2}),
      topology::Layout::make(8, {.groups = std::vector<int>{4, 2, 2}, .shard_degree = 2, .replicate_degree = -1})};
  for (const topology::Layout& layout : same_shards) {
    SCOPED_TRACE(layout.describe());
    // Parameters, gradients and moments.
    EXPECT_EQ(digests_after_steps(layout, plan::Update::adamw, true).size(), 4U);
    EXPECT_EQ(digests_after_steps(layout, plan::Update::sgd_momentum, true).size(), 3U);
    EXPECT_EQ(digests_after_steps(layout, plan::Update::muon, true).size(), 3U);
    EXPECT_EQ(digests_after_steps(layout, plan::Update::adamw, true, at::kBFloat16).size(), 4U);
    EXPECT_THROW(digests_after_steps(layout, plan::Update::adamw, false), base::RunError);
  }
  // Plain SGD rounds an element in one way, wherever it lies in a shard.
  const auto unequal = topology::Layout::make(4, {.groups = std::vector<int>{1, 3}});
  EXPECT_EQ(digests_after_steps(unequal, plan::Update::sgd, true).size(), 2U);
  EXPECT_THROW(digests_after_steps(unequal, plan::Update::sgd, false), base::RunError);
}

}  // namespace
}  // namespace fedshard::train
