// Random models on random layouts: sizes, unit splits, ties, frozen sets, dtypes and schedules that nobody chose.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <mutex>
#include <random>

#include "fedshard/plan/check_schedule.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/plan/group_local.h"
#include "fedshard/plan/memory.h"
#include "fedshard/shard/engine.h"
#include "tests/support/rank_threads.h"
#include "tests/support/sanitized.h"
#include "tests/support/tiny_model.h"

namespace fedshard::shard {
namespace {

using testing_support::held_of;
using testing_support::tiny_batch;

constexpr std::int64_t kLength = 4;
constexpr double kLr = 0.1;

class Dice {
 public:
  explicit Dice(unsigned seed) : random_(seed) {}
  int upto(int most) { return 1 + static_cast<int>(random_() % static_cast<unsigned>(most)); }  // 1 to most
  bool coin() { return random_() % 2 == 0; }

 private:
  std::mt19937 random_;
};

// Units of one to four parameters, some of one element, some larger than all others together.
nn::Model random_model(Dice& dice, int vocab) {
  const int hidden = dice.upto(9), blocks = dice.upto(4) - 1;
  const bool tied = dice.coin();
  nn::Model model;
  auto& plan = model.plan;
  plan.units.push_back({"in", {{"in.table", {vocab, hidden}, {}}}});
  if (tied && dice.coin()) plan.units[0].parameters.push_back({"in.unused", {dice.upto(3)}, {}});
  plan.stages.push_back({"in", {0}, false});
  model.stages.push_back([](nn::Parameters p, const at::Tensor&, const nn::MicroBatch& batch) {
    return at::embedding(p[0], batch.tokens);
  });
  for (int b = 0; b < blocks; ++b) {
    const std::string name = "b" + std::to_string(b);
    const int inner = dice.upto(12);
    const bool scaled = dice.coin(), shifted = dice.coin();
    plan::UnitSpec unit{name, {{name + ".up", {inner, hidden}, {}}, {name + ".down", {hidden, inner}, {}}}};
    if (scaled) unit.parameters.push_back({name + ".scale", {1}, {}});
    if (shifted) unit.parameters.push_back({name + ".shift", {hidden}, {}});
    plan.units.push_back(unit);
    plan.stages.push_back({name, {b + 1}});
    model.stages.push_back([scaled, shifted](nn::Parameters p, const at::Tensor& x, const nn::MicroBatch&) {
      at::Tensor y = at::linear(at::tanh(at::linear(x, p[0])), p[1]);
      if (scaled) y = y * p[2];
      if (shifted) y = y + p[scaled ? 3 : 2];
      return x + y;
    });
  }
  if (!tied) plan.units.push_back({"out", {{"out.table", {vocab, hidden}, {}}}});
  plan.stages.push_back({"out", {tied ? 0 : blocks + 1}});
  model.stages.push_back([](nn::Parameters p, const at::Tensor& x, const nn::MicroBatch& batch) {
    const at::Tensor logits = at::linear(x, p[0]).to(at::kFloat);
    return at::cross_entropy_loss(logits.flatten(0, 1), batch.labels.flatten(), {}, at::Reduction::Sum, -100);
  });
  return model;
}

// The plan with some parameters frozen, but not all of those that the loss depends on.
plan::ModelPlan random_freeze(Dice& dice, const plan::ModelPlan& plan) {
  std::vector<std::string> patterns;
  for (const auto& unit : plan.units) {
    for (const auto& parameter : unit.parameters) {
      if (parameter.name != "in.table" && dice.upto(4) == 1) patterns.push_back(parameter.name);
    }
  }
  if (plan.units.size() > 1 && patterns.empty() && dice.coin()) patterns.push_back("in.*");
  return plan::freeze(plan, patterns);
}

// Some of the rest group-local: cut into more units the engine trains the same model.
plan::ModelPlan random_group_local(Dice& dice, const plan::ModelPlan& plan) {
  std::vector<std::string> patterns;
  bool one_is_left = false;
  for (const auto& unit : plan.units) {
    for (const auto& parameter : unit.parameters) {
      if (one_is_left && dice.upto(3) == 1) patterns.push_back(parameter.name);
      one_is_left |= !unit.frozen;
    }
  }
  return plan::keep_in_groups(plan, {{}, patterns});
}

struct Draw {
  int shards, replicas, micro, vocab;
  plan::ScheduleOptions schedule;
  UnitDtypes dtypes;
  double max_norm;
};

Draw draw(Dice& dice) {
  Draw d{dice.upto(5), dice.upto(3), dice.upto(2), 1 + dice.upto(15), {}, {}, dice.coin() ? 0.2 : 0.0};
  d.schedule = {dice.upto(3), dice.coin(), dice.upto(3) - 1, dice.coin(), dice.coin()};
  d.schedule.fused_backward = d.schedule.micro_steps == 1 && d.max_norm == 0 && dice.coin();
  if (dice.upto(3) == 1) d.dtypes = {at::kBFloat16, dice.coin() ? at::kFloat : at::kBFloat16};
  if (dice.upto(5) == 1) d.dtypes.master = at::kBFloat16;
  return d;
}

// Micro-batch m of a rank, with some labels masked, sometimes all of them.
nn::MicroBatch batch_of(const Draw& d, int step, int rank, int m) {
  const int ranks = d.shards * d.replicas;
  const int index = (step * ranks + rank) * d.schedule.micro_steps + m;
  nn::MicroBatch batch = tiny_batch(index * d.micro, d.micro, kLength, d.vocab);
  if (index % 3 == 1) batch.labels.narrow(1, 0, 2).fill_(-100);
  if (index % 7 == 5) batch.labels.fill_(-100);
  return batch;
}

void expect_equals_whole(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Dice dice(seed);
  const Draw d = draw(dice);
  const nn::Model whole = random_model(dice, d.vocab);
  nn::Model model = whole;
  model.plan = random_group_local(dice, random_freeze(dice, whole.plan));
  ASSERT_EQ(plan::check_step_schedule(model.plan, d.schedule, plan::step_schedule(model.plan, d.schedule)),
            std::vector<std::string>{});
  const plan::MemoryTable memory =
      plan::predict_memory(model.plan, {.shards = d.shards,
                                        .replicas = d.replicas,
                                        .master_bytes = static_cast<int>(c10::elementSize(d.dtypes.master)),
                                        .compute_bytes = static_cast<int>(c10::elementSize(d.dtypes.compute)),
                                        .reduce_bytes = static_cast<int>(c10::elementSize(d.dtypes.reduce)),
                                        .schedule = d.schedule});
  const bool fp32 = d.dtypes.compute == at::kFloat && d.dtypes.master == at::kFloat;
  const double loss_tolerance = fp32 ? 1e-5 : 0.03, tolerance = fp32 ? 2e-5 : 0.1;
  const int ranks = d.shards * d.replicas;
  const auto layout = topology::Layout::make(ranks, {.shard_degree = d.shards, .replicate_degree = d.replicas});
  constexpr int kSteps = 2;
  testing_support::TinyReference reference(whole, testing_support::names_of_frozen(model.plan));
  std::vector<double> losses, norms;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> tokens, labels;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int m = 0; m < d.schedule.micro_steps; ++m) {
        const nn::MicroBatch batch = batch_of(d, step, rank, m);
        tokens.push_back(batch.tokens);
        labels.push_back(batch.labels);
      }
    }
    const nn::MicroBatch all{at::cat(tokens), at::cat(labels)};
    if (all.labels.ge(0).sum().item<std::int64_t>() == 0) return;  // the reference has no mean of nothing
    losses.push_back(reference.backward(all));
    norms.push_back(reference.flat(true).to(at::kDouble).norm().item<double>());
    reference.descend(kLr * (d.max_norm > 0 ? std::min(1.0, d.max_norm / (norms.back() + 1e-6)) : 1.0));
  }
  const at::Tensor parameters = reference.flat(false);
  std::mutex checks;
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, d.shards, layout.at(rank).shard, axes, {d.dtypes, d.schedule, d.max_norm}, registry);
    engine.fill(testing_support::tiny_filler(engine.plan()));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<nn::MicroBatch> batches;
      for (int m = 0; m < d.schedule.micro_steps; ++m) batches.push_back(batch_of(d, step, rank, m));
      const StepResult result = engine.step(batches, [&](int u) {
        const c10::NoGradGuard no_grad;
        engine.parameters().unit(u).sub_(engine.gradients().unit(u), kLr);
      });
      const std::lock_guard lock(checks);
      EXPECT_NEAR(result.loss, losses[step], loss_tolerance * losses[step]);
      EXPECT_NEAR(result.grad_norm, norms[step], (fp32 ? 5e-5 : 0.1) * norms[step] + 1e-7);
    }
    const std::lock_guard lock(checks);
    for (int u = 0; u < engine.map().units(); ++u) {
      const at::Tensor right = held_of(model.plan, u, engine.map().range(u), parameters);
      if (right.numel() == 0) continue;
      EXPECT_LE((engine.parameters().real(u) - right).abs().max().item<double>(), tolerance) << u;
    }
    EXPECT_EQ(engine.peak_buffer_bytes(), memory.peak_buffers);
    EXPECT_EQ(registry.bytes(Role::parameters), memory.bytes(plan::MemoryPurpose::parameters));
    EXPECT_EQ(registry.bytes(Role::gradients), memory.bytes(plan::MemoryPurpose::gradients));
  });
}

TEST(RandomModels, EqualTheUnshardedOnes) {
  const char* scale = testing_support::kSanitized ? nullptr : std::getenv("FEDSHARD_TEST_SCALE");
  const unsigned cases = scale != nullptr && std::string(scale) == "long" ? 2000 : 200;
  for (unsigned seed = 1; seed <= cases; ++seed) {
    expect_equals_whole(seed);
    if (testing::Test::HasFailure()) break;
  }
}

}  // namespace
}  // namespace fedshard::shard
