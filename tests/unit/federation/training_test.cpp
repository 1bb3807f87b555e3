// Federated training on the engine against a single process that holds every group's whole model and averages by hand.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "fedshard/federation/round.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using testing_support::tiny_batch;
using testing_support::tiny_value;
using testing_support::TinyReference;
using testing_support::TinyShape;

constexpr std::int64_t kLength = 6;
constexpr std::int64_t kGroupBatch = 4;  // sequences of a group and step
constexpr double kLr = 0.3;

struct Case {
  Shape shape;
  int every = 1;  // K
  int rounds = 1;
  bool unequal = false;  // the first group has fewer tokens
  int steps() const { return every * rounds; }
};

// The batch of a group at a step: other sequences at every step and for every group.
nn::MicroBatch group_batch(const Case& c, int group, int step, int vocab) {
  nn::MicroBatch batch = tiny_batch((step * c.shape.groups + group) * kGroupBatch, kGroupBatch, kLength, vocab);
  if (c.unequal && group == 0) batch.labels.narrow(1, 0, kLength / 2).fill_(-100);
  return batch;
}

std::vector<at::Tensor> units_of(const TinyReference& reference, const plan::ModelPlan& plan) {
  const at::Tensor flat = reference.flat(false).clone();
  std::vector<at::Tensor> units;
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    units.push_back(flat.narrow(0, plan.global_offset(u), plan.units[u].numel()));
  }
  return units;
}

// Each group's whole model in turn, averaged every K steps; the parameters at the end, by unit.
std::vector<at::Tensor> groups_in_turn(const Case& c, const nn::Model& model, int vocab) {
  std::vector<TinyReference> groups;
  for (int g = 0; g < c.shape.groups; ++g) groups.emplace_back(model);
  std::vector<double> tokens(groups.size(), 0);
  for (int step = 0; step < c.steps(); ++step) {
    for (int g = 0; g < c.shape.groups; ++g) {
      const nn::MicroBatch batch = group_batch(c, g, step, vocab);
      groups[static_cast<std::size_t>(g)].backward(batch);
      groups[static_cast<std::size_t>(g)].descend(kLr);
      tokens[static_cast<std::size_t>(g)] += batch.labels.ge(0).sum().item<double>();
    }
    if ((step + 1) % c.every != 0) continue;
    double total = 0;
    for (const double t : tokens) total += t;
    const c10::NoGradGuard no_grad;
    for (std::size_t u = 0; u < model.plan.units.size(); ++u) {
      for (std::size_t p = 0; p < model.plan.units[u].parameters.size(); ++p) {
        at::Tensor mean = at::zeros(model.plan.units[u].parameters[p].shape, at::kDouble);
        for (std::size_t g = 0; g < groups.size(); ++g) {
          mean += groups[g].parameters()[u][p].to(at::kDouble) * (tokens[g] / total);
        }
        for (TinyReference& group : groups) group.parameters()[u][p].copy_(mean);
      }
    }
    tokens.assign(groups.size(), 0);
  }
  return units_of(groups[0], model.plan);
}

// One model trained on the batches of all groups at once.
std::vector<at::Tensor> one_process(const Case& c, const nn::Model& model, int vocab) {
  TinyReference reference(model);
  for (int step = 0; step < c.steps(); ++step) {
    std::vector<at::Tensor> tokens, labels;
    for (int g = 0; g < c.shape.groups; ++g) {
      const nn::MicroBatch batch = group_batch(c, g, step, vocab);
      tokens.push_back(batch.tokens);
      labels.push_back(batch.labels);
    }
    reference.backward({at::cat(tokens), at::cat(labels)});
    reference.descend(kLr);
  }
  return units_of(reference, model.plan);
}

// The sharded, federated run; every rank's shard of every unit must be within `tolerance` of `expected`.
void expect_trains_to(const Case& c, const nn::Model& model, int vocab, const std::vector<at::Tensor>& expected,
                      double tolerance) {
  const topology::Layout layout = c.shape.layout();
  const std::int64_t mine = kGroupBatch / (c.shape.replicas * c.shape.shards);
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        const topology::Coordinates at = layout.at(rank);
        shard::StateRegistry registry;
        shard::Engine engine(model, c.shape.shards, at.shard, axes, {}, registry);
        set_parameters(engine, tiny_value);
        Federation federation(layout, rank, {}, engine, axes, client, registry);
        std::int64_t tokens = 0;
        for (int step = 0; step < c.steps(); ++step) {
          const nn::MicroBatch whole = group_batch(c, at.group, step, vocab);
          const nn::MicroBatch batch{whole.tokens.narrow(0, at.local * mine, mine),
                                     whole.labels.narrow(0, at.local * mine, mine)};
          const shard::StepResult result = engine.step({&batch, 1}, [&](int unit) {
            const c10::NoGradGuard no_grad;
            engine.parameters().unit(unit).sub_(engine.gradients().unit(unit), kLr);
          });
          tokens += static_cast<std::int64_t>(result.tokens);
          if ((step + 1) % c.every != 0) continue;
          federation.run_round({.round = (step + 1) / c.every, .step = step + 1, .tokens = tokens});
          tokens = 0;
        }
        for (int u = 0; u < engine.map().units(); ++u) {
          const topology::Range held = engine.map().range(u);
          if (held.size() == 0) continue;
          const at::Tensor theirs = expected[static_cast<std::size_t>(u)].slice(0, held.begin, held.end);
          const at::Tensor error = (engine.parameters().real(u) - theirs).abs().max();
          EXPECT_LE(error.item<double>(), tolerance * theirs.abs().max().item<double>()) << "unit " << u;
        }
      });
  EXPECT_EQ(aftermath.errors, std::vector<std::string>(aftermath.errors.size()));
  EXPECT_EQ(aftermath.status.rounds, c.rounds);
}

TEST(FederatedTraining, EqualsTheGroupsInTurn) {
  for (const Shape& shape : {Shape{2, 1, 1}, Shape{2, 1, 2}, Shape{2, 2, 2}, Shape{3, 2, 1}, Shape{2, 1, 4}}) {
    for (const bool unequal : {false, true}) {
      for (const bool tied : {false, true}) {
        const Case c{shape, 4, 3, unequal};
        const TinyShape tiny{.tied = tied};
        const nn::Model model = testing_support::tiny_model(tiny);
        expect_trains_to(c, model, tiny.vocab, groups_in_turn(c, model, tiny.vocab), 1e-6);
        ASSERT_FALSE(testing::Test::HasFailure()) << shape << (unequal ? ", unequal" : "") << (tied ? ", tied" : "");
      }
    }
  }
}

// One step a round, without momentum: the mean of the groups' parameters is one step along the mean gradient.
TEST(FederatedTraining, OfOneStepARoundEqualsOneProcessOnTheConcatenatedBatch) {
  for (const Shape& shape : {Shape{2, 1, 2}, Shape{2, 2, 1}, Shape{4, 1, 1}, Shape{2, 2, 2}}) {
    for (const bool unequal : {false, true}) {
      const Case c{shape, 1, 10, unequal};
      const TinyShape tiny{};
      const nn::Model model = testing_support::tiny_model(tiny);
      expect_trains_to(c, model, tiny.vocab, one_process(c, model, tiny.vocab), 1e-5);
      ASSERT_FALSE(testing::Test::HasFailure()) << shape << (unequal ? ", unequal" : "");
    }
  }
}

}  // namespace
}  // namespace fedshard::federation
