// What is done to a step's gradient before it is clipped.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include "fedshard/base/error.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/shard/engine.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::shard {
namespace {

using testing_support::on_ranks;
using testing_support::tiny_batch;
using testing_support::tiny_model;
using testing_support::TinyReference;

constexpr std::int64_t kLength = 6;
constexpr int kVocab = 11, kSequences = 36;
constexpr double kMaxNorm = 0.05;

void expect_held(const Engine& engine, int unit, const at::Tensor& whole, const char* what) {
  const at::Tensor right = testing_support::held_of(engine.plan(), unit, engine.map().range(unit), whole);
  if (right.numel() == 0) return;
  const double error = (engine.gradients().real(unit) - right).abs().max().item<double>();
  EXPECT_LE(error, 2e-5 * std::max(whole.abs().max().item<double>(), 1e-3)) << what << " of unit " << unit;
}

// Parameters times this are added to the gradient.
constexpr double kPull = 0.7;

struct AddCase {
  int shards = 1, replicas = 1;
  plan::ScheduleOptions schedule = {};
  std::vector<std::string> frozen = {};
};

// One step in which each unit's parameters are added to its gradient.
void expect_adds(const AddCase& c) {
  SCOPED_TRACE(fmt::format("F{} R{} A{}{}", c.shards, c.replicas, c.schedule.micro_steps,
                           c.schedule.fused_backward ? " fused" : ""));
  const nn::Model whole = tiny_model({});
  nn::Model model = whole;
  model.plan = plan::freeze(whole.plan, c.frozen);
  TinyReference reference(whole, testing_support::names_of_frozen(model.plan));
  const double loss = reference.backward(tiny_batch(0, kSequences, kLength, kVocab));
  at::Tensor expected = reference.flat(true).clone();
  for (int u = 0; u < static_cast<int>(model.plan.units.size()); ++u) {
    if (model.plan.units[u].frozen) continue;
    for (const plan::GlobalRun& run : model.plan.global_runs(u, {0, model.plan.units[u].numel()})) {
      const auto part = [&](const at::Tensor& flat) { return flat.narrow(0, run.index, run.range.size()); };
      part(expected).add_(part(reference.flat(false)), kPull);
    }
  }
  const double norm = expected.to(at::kDouble).norm().item<double>(),
               max_norm = c.schedule.fused_backward ? 0 : kMaxNorm;
  if (max_norm > 0) {
    EXPECT_GT(norm, max_norm);
    expected = expected * (max_norm / (norm + 1e-6));
  }
  std::mutex mutex;
  const auto layout =
      topology::Layout::make(c.shards * c.replicas, {.shard_degree = c.shards, .replicate_degree = c.replicas});
  on_ranks(layout, [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, c.shards, layout.at(rank).shard, axes, {{}, c.schedule, max_norm}, registry);
    engine.fill(testing_support::tiny_filler(engine.plan()));
    const int mine = kSequences / layout.world(), micro = mine / c.schedule.micro_steps;
    std::vector<nn::MicroBatch> batches;
    for (int m = 0; m < c.schedule.micro_steps; ++m) {
      batches.push_back(tiny_batch(rank * mine + m * micro, micro, kLength, kVocab));
    }
    std::map<int, int> calls;
    const GradientHooks hooks{.add_to_mean = [&](int unit) {
      ++calls[unit];
      engine.gradients().real(unit).add_(engine.parameters().real(unit), kPull);
    }};
    const StepResult result = engine.step(
        batches,
        [&](int unit) {
          const std::lock_guard lock(mutex);
          EXPECT_EQ(calls[unit], 1);
          expect_held(engine, unit, expected, "gradient");
        },
        hooks);
    const std::lock_guard lock(mutex);
    std::map<int, int> once;
    for (int u = 0; u < engine.map().units(); ++u) {
      if (!model.plan.units[u].frozen) once[u] = 1;
    }
    EXPECT_EQ(calls, once);
    EXPECT_NEAR(result.loss, loss, 1e-5 * loss);
    EXPECT_NEAR(result.grad_norm, norm, 5e-5 * norm);
  });
}

TEST(GradientHooks, WhatIsAddedToTheMeanIsPartOfNormAndClipping) {
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {3, 1}, {1, 2}, {2, 2}}) {
    for (const int micro_steps : {1, 3}) {
      expect_adds({shards, replicas, {.micro_steps = micro_steps}});
      expect_adds({shards, replicas, {.micro_steps = micro_steps, .reduce_each_micro_step = false}});
    }
    expect_adds({shards, replicas, {.fused_backward = true}});
    for (const bool fused : {false, true}) {
      expect_adds({shards, replicas, {.fused_backward = fused}, {"table", "block1.*", "projection"}});
    }
  }
}

// Of as many ranks in every group: their twins hold the same shards.
StepSums sum_over_twins(comm::Axes& axes, const Arena& sums, const StepSums& of_group) {
  axes.federation->all_reduce(sums.flat(), comm::Purpose::aggregate)->wait();
  const double norm = sums.flat().to(at::kDouble).norm().item<double>();
  std::array<double, 1> squares{axes.replica->index() == 0 ? norm * norm : 0};
  axes.group->sum(squares);
  std::array<double, 2> totals{of_group.loss, of_group.tokens};
  comm::sum_over_groups(axes, totals);
  return {totals[0], totals[1], squares[0]};
}

// Group 0's sequences come first; one of them has a single token.
nn::MicroBatch all_sequences() {
  nn::MicroBatch batch = tiny_batch(0, kSequences, kLength, kVocab);
  batch.labels.narrow(0, 1, 1).narrow(1, 1, kLength - 1).fill_(-100);
  return batch;
}

nn::MicroBatch part_of(const nn::MicroBatch& batch, std::int64_t begin, std::int64_t count) {
  return {batch.tokens.narrow(0, begin, count), batch.labels.narrow(0, begin, count)};
}

TEST(GradientHooks, ASumOverGroupsIsAStepOnAllSequences) {
  const nn::Model model = tiny_model({});
  const nn::MicroBatch batch = all_sequences();
  TinyReference reference(model);
  reference.backward(batch);
  at::Tensor expected = reference.flat(true).clone();
  const double norm = expected.to(at::kDouble).norm().item<double>();
  EXPECT_GT(norm, kMaxNorm);
  expected.mul_(kMaxNorm / (norm + 1e-6));
  for (const auto& [groups, replicas, shards] : {std::tuple{2, 1, 1}, {3, 1, 2}, {2, 2, 1}, {1, 2, 2}}) {
    const auto layout = topology::Layout::make(
        groups * replicas * shards, {.groups = groups, .shard_degree = shards, .replicate_degree = replicas});
    std::mutex mutex;
    on_ranks(layout, [&, groups = groups, shards = shards](int rank, comm::Axes& axes) {
      StateRegistry registry;
      Engine engine(model, shards, layout.at(rank).shard, axes, {{}, {}, kMaxNorm}, registry);
      engine.fill(testing_support::tiny_filler(engine.plan()));
      const int mine = kSequences / layout.world(), group = layout.group_of(rank);
      const nn::MicroBatch my_batch = part_of(batch, rank * mine, mine);
      const nn::MicroBatch of_group = part_of(batch, group * kSequences / groups, kSequences / groups);
      const GradientHooks hooks{.sum_over_groups = [&](const Arena& sums, const StepSums& totals) {
        EXPECT_EQ(totals.squares, 0);
        return sum_over_twins(axes, sums, totals);
      }};
      int stepped = 0;
      const StepResult result = engine.step(
          {&my_batch, 1}, [&](int) { ++stepped; }, hooks);
      const std::lock_guard lock(mutex);
      EXPECT_EQ(stepped, engine.map().units());
      for (int u = 0; u < engine.map().units(); ++u) expect_held(engine, u, expected, "gradient");
      EXPECT_NEAR(result.grad_norm, norm, 5e-5 * norm);
      const double loss = TinyReference(model).backward(of_group);
      EXPECT_NEAR(result.loss, loss, 1e-5 * loss);
      EXPECT_EQ(result.tokens, of_group.labels.ge(0).sum().item<double>());
    });
  }
}

// A NaN in one rank of one group: in its loss and gradient, or in its loss alone.
TEST(GradientHooks, OneGroupsNaNSkipsTheStepOfAll) {
  for (const bool in_gradient : {true, false}) {
    const auto layout = topology::Layout::make(4, {.groups = 2});
    std::mutex mutex;
    on_ranks(layout, [&](int rank, comm::Axes& axes) {
      StateRegistry registry;
      const nn::Model whole = tiny_model({});
      nn::Model model = whole;
      model.stages.back() = [&](nn::Parameters p, const at::Tensor& x, const nn::MicroBatch& b) {
        const at::Tensor loss = whole.stages.back()(p, x, b);
        if (rank != 3) return loss;
        return in_gradient ? loss * std::nan("") : loss + std::nan("");
      };
      Engine engine(model, 2, layout.at(rank).shard, axes, {{}, {}, 1.0, NonFinite::skip}, registry);
      engine.fill(testing_support::tiny_filler(engine.plan()));
      const GradientHooks hooks{.sum_over_groups = [&](const Arena& sums, const StepSums& totals) {
        return sum_over_twins(axes, sums, totals);
      }};
      const nn::MicroBatch batch = tiny_batch(rank, 1, kLength, kVocab);
      const StepResult result = engine.step(
          {&batch, 1}, [](int) { ADD_FAILURE() << "a step with NaN"; }, hooks);
      const std::lock_guard lock(mutex);
      EXPECT_TRUE(result.skipped);
      EXPECT_EQ(std::isfinite(result.loss), rank < 2);  // it stays the group's own
      EXPECT_EQ(std::isfinite(result.grad_norm), !in_gradient);
    });
  }
}

TEST(GradientHooks, ASumOverGroupsGoesWithNothingElse) {
  const nn::Model model = tiny_model({});
  on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    const GradientHooks both{.sum_over_groups = [](const Arena&, const StepSums& sums) { return sums; },
                             .add_to_mean = [](int) {}};
    const GradientHooks sum{.sum_over_groups = both.sum_over_groups};
    const nn::MicroBatch batch = tiny_batch(0, 1, kLength, kVocab);
    StateRegistry registry, other;
    Engine engine(model, 1, 0, axes, {}, registry);
    Engine fused(model, 1, 0, axes, {{}, {.fused_backward = true}}, other);
    EXPECT_THROW(engine.step(
                     {&batch, 1}, [](int) {}, both),
                 base::RunError);
    EXPECT_THROW(fused.step(
                     {&batch, 1}, [](int) {}, sum),
                 base::RunError);
  });
}

}  // namespace
}  // namespace fedshard::shard
