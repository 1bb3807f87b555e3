// Rounds with a delay and in fragments, against the same rounds of whole models in fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "fedshard/federation/round.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using testing_support::tiny_model;
using testing_support::tiny_value;
using Values = std::vector<double>;

constexpr std::int64_t kSteps = 14;

// What step `step` adds to a group's element.
double walked(std::int64_t index, int group, std::int64_t step) {
  return 0.01 * tiny_value(index + 17 * group + 29 * step);
}

struct Case {
  topology::LayoutOptions layout;
  int world = 2;
  plan::RoundOptions rounds;
  double mix = 0;
  plan::Outer outer = plan::Outer::fedavg;
};

// All groups' models, element by element.
class Reference {
 public:
  Reference(const Case& c, const plan::ModelPlan& plan, int groups) : case_(c), models_(groups, Values(plan.numel())) {
    for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
      for (std::int64_t i = 0; i < plan.units[u].numel(); ++i) fragment_.push_back(u % c.rounds.fragments);
    }
    for (Values& model : models_) {
      for (std::int64_t i = 0; i < plan.numel(); ++i) model[i] = tiny_value(i);
    }
    anchor_ = models_[0];
    momentum_.assign(anchor_.size(), 0);
  }

  void step(std::int64_t step) {
    for (int g = 0; g < static_cast<int>(models_.size()); ++g) {
      for (std::size_t i = 0; i < anchor_.size(); ++i) models_[g][i] += walked(static_cast<std::int64_t>(i), g, step);
    }
    for (const plan::Op& op : plan::round_operations(case_.rounds, step)) {
      if (op.kind == plan::OpKind::exchange) brought_ = models_;
      if (op.kind == plan::OpKind::apply) apply(op.fragment);
    }
  }

  // Groups count alike: all have as many tokens.
  void apply(int fragment) {
    for (std::size_t i = 0; i < anchor_.size(); ++i) {
      if (fragment_[i] != fragment) continue;
      double mean = 0;
      for (const Values& model : brought_) mean += model[i] / static_cast<double>(brought_.size());
      if (case_.outer == plan::Outer::nesterov) {
        const double gradient = anchor_[i] - mean;
        momentum_[i] = 0.9 * momentum_[i] + gradient;
        anchor_[i] -= 0.7 * (gradient + 0.9 * momentum_[i]);
      } else {
        anchor_[i] = mean;
      }
      for (Values& model : models_) model[i] = case_.mix * model[i] + (1 - case_.mix) * anchor_[i];
    }
  }

  const Values& model(int group) const { return models_[group]; }

 private:
  Case case_;
  std::vector<Values> models_, brought_;
  Values anchor_, momentum_;
  std::vector<int> fragment_;
};

void expect_follows_reference(const Case& c) {
  const topology::Layout layout = topology::Layout::make(c.world, c.layout);
  const nn::Model model = tiny_model({});
  SCOPED_TRACE(fmt::format("{}, every {}, {} fragments, delay {}, mix {}", layout.describe(), c.rounds.every,
                           c.rounds.fragments, c.rounds.delay, c.mix));
  std::vector<Reference> after;  // step s
  after.emplace_back(c, model.plan, layout.groups());
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    after.push_back(after.back());
    after.back().step(step);
  }
  std::mutex checks;
  std::int64_t begun = 0;
  const auto body = [&](int rank, comm::Axes& axes, comm::Axes& others, control::CoordinatorClient& client) {
    const topology::Coordinates at = layout.at(rank);
    shard::StateRegistry registry;
    shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {}, registry);
    FederationOptions options;
    options.outer = plan::usual_options(c.outer);
    options.rounds = c.rounds;
    options.mix = c.mix;
    const comm::TrafficCounter counter(comm::groups_by_rank(layout));
    Federation federation(layout, rank, options, engine, axes, client, registry,
                          {c.rounds.delay > 0 ? others : axes, &counter});
    set_parameters(engine, tiny_value);
    federation.set_anchor();
    std::int64_t round = 0;
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      for (int u = 0; u < engine.map().units(); ++u) {
        const std::int64_t first = model.plan.global_offset(u) + engine.map().range(u).begin;
        const at::Tensor values = engine.parameters().real(u);
        float* p = values.mutable_data_ptr<float>();
        for (std::int64_t i = 0; i < values.numel(); ++i) p[i] += static_cast<float>(walked(first + i, at.group, step));
      }
      for (const plan::Op& op : plan::round_operations(c.rounds, step)) {
        if (op.kind == plan::OpKind::exchange) {
          federation.begin_round({.round = ++round, .step = step, .tokens = 1, .fragment = op.fragment});
        } else {
          const RoundOutcome outcome = federation.finish_round();
          EXPECT_LE(outcome.exposed_seconds, outcome.seconds);
          EXPECT_EQ(outcome.digest.has_value(), c.rounds.delay == 0);
        }
      }
      const Values& expected = after[static_cast<std::size_t>(step)].model(at.group);
      const std::lock_guard lock(checks);
      for (int u = 0; u < engine.map().units(); ++u) {
        const std::int64_t first = model.plan.global_offset(u) + engine.map().range(u).begin;
        const at::Tensor values = engine.parameters().real(u);
        for (std::int64_t i = 0; i < values.numel(); ++i) {
          ASSERT_NEAR(values.const_data_ptr<float>()[i], expected[static_cast<std::size_t>(first + i)], 1e-6)
              << "step " << step << ", rank " << rank << ", element " << first + i;
        }
      }
    }
    if (federation.is_under_way()) federation.finish_round();
    federation.settle();
    const std::lock_guard lock(checks);
    begun = round;
  };
  const Aftermath aftermath = on_federated_ranks(layout, OverlappingBody(body));
  for (const std::string& error : aftermath.errors) EXPECT_EQ(error, "");
  ASSERT_EQ(std::ssize(aftermath.rounds), begun);  // digests agreed in each
  for (std::size_t r = 0; r < aftermath.rounds.size(); ++r) {
    EXPECT_EQ(aftermath.rounds[r]["round"], r + 1);
    EXPECT_EQ(aftermath.rounds[r]["fragment"], r % static_cast<std::size_t>(c.rounds.fragments));
  }
}

TEST(Overlap, DelayFragmentsAndMixFollowTheReference) {
  using List = std::vector<int>;
  const std::vector<std::pair<int, topology::LayoutOptions>> layouts{
      {1, {}},
      {2, {.groups = 2}},
      {8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2}},
      {4, {.groups = List{1, 3}}},
      {6, {.groups = List{4, 2}, .shard_degree = List{2, 1}, .replicate_degree = -1}},
  };
  const std::vector<plan::RoundOptions> rounds{
      {.every = 1, .delay = 1},
      {.every = 4, .delay = 2},
      {.every = 5, .delay = 5},
      {.every = 4, .fragments = 2},
      {.every = 5, .fragments = 3, .delay = 1},
      {.every = 6, .fragments = 2, .delay = 3},
  };
  for (const auto& [world, layout] : layouts) {
    for (const plan::RoundOptions& options : rounds) {
      for (const plan::Outer outer : {plan::Outer::fedavg, plan::Outer::nesterov}) {
        expect_follows_reference({layout, world, options, 0, outer});
        if (options.delay > 0) expect_follows_reference({layout, world, options, 0.5, outer});
        ASSERT_FALSE(testing::Test::HasFailure());
      }
    }
  }
}

// Each fragment sends its own bytes and no more: together those of one round of the whole model.
TEST(Overlap, FragmentsTogetherSendWhatTheWholeSends) {
  const auto layout = topology::Layout::make(4, {.groups = 2, .shard_degree = 1, .replicate_degree = 2});
  const nn::Model model = tiny_model({.tied = true});
  const auto sent = [&](int fragments) {
    return on_federated_ranks(layout,
                              [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
                                shard::StateRegistry registry;
                                shard::Engine engine(model, 1, 0, axes, {}, registry);
                                FederationOptions options;
                                options.rounds = {.every = 8, .fragments = fragments};
                                Federation federation(layout, rank, options, engine, axes, client, registry);
                                set_parameters(engine, tiny_value);
                                for (int f = 0; f < fragments; ++f) {
                                  federation.run_round({.round = f + 1, .step = 1, .tokens = 1, .fragment = f});
                                }
                              })
        .traffic.of(comm::Purpose::aggregate);
  };
  EXPECT_EQ(sent(1), (2 + 2) * model.plan.numel() * 4);
  EXPECT_EQ(sent(2), sent(1));
}

// A group that the guard left out takes over the new parameters whole: half of what is not finite would not be.
TEST(Overlap, AGroupThatIsLeftOutKeepsNothingOfItsOwn) {
  const auto layout = topology::Layout::make(3, {.groups = 3});
  const nn::Model model = tiny_model({});
  const auto body = [&](int rank, comm::Axes& axes, comm::Axes& others, control::CoordinatorClient& client) {
    shard::StateRegistry registry;
    shard::Engine engine(model, 1, 0, axes, {}, registry);
    FederationOptions options;
    options.rounds = {.every = 2, .delay = 1};
    options.mix = 0.5;
    Federation federation(layout, rank, options, engine, axes, client, registry, {others});
    set_parameters(engine, [&](std::int64_t index) { return rank == 1 && index == 3 ? std::nanf("") : 1.0f; });
    federation.begin_round({.round = 1, .step = 2, .tokens = 1});
    set_parameters(engine, [&](std::int64_t index) { return rank == 1 && index == 3 ? std::nanf("") : 2.0f; });
    EXPECT_EQ(federation.finish_round().left_out, std::vector<int>{1});
    federation.settle();
    const at::Tensor expected =
        arena_of(model.plan, engine.map(), [&](std::int64_t) { return rank == 1 ? 1.0f : 1.5f; });
    EXPECT_TRUE(same_bits(engine.parameters().flat(), expected)) << rank;
  };
  const Aftermath aftermath = on_federated_ranks(layout, OverlappingBody(body));
  for (const std::string& error : aftermath.errors) EXPECT_EQ(error, "");
}

// An error beside training comes to light where the round is finished; nothing has changed.
TEST(Overlap, AFailureBesideTrainingLeavesTheParameters) {
  const auto layout = topology::Layout::make(2, {.groups = 2});
  const nn::Model model = tiny_model({});
  const auto body = [&](int rank, comm::Axes& axes, comm::Axes& others, control::CoordinatorClient& client) {
    if (rank == 1) {
      hook(others.federation, {.before_exchange = [](int) { base::fail<base::RunError>("the victim fails"); }});
    }
    shard::StateRegistry registry;
    shard::Engine engine(model, 1, 0, axes, {}, registry);
    FederationOptions options;
    options.rounds = {.every = 2, .delay = 1};
    Federation federation(layout, rank, options, engine, axes, client, registry, {others});
    set_parameters(engine, tiny_value);
    federation.begin_round({.round = 1, .step = 2, .tokens = 1});
    try {
      federation.finish_round();
      ADD_FAILURE() << "rank " << rank << " has not noticed";
    } catch (const base::Error&) {
      EXPECT_TRUE(same_bits(engine.parameters().flat(), arena_of(model.plan, engine.map(), tiny_value)));
      throw;
    }
  };
  const Aftermath aftermath = on_federated_ranks(layout, OverlappingBody(body));
  ASSERT_TRUE(aftermath.status.first_error);
  EXPECT_NE(aftermath.status.first_error->message.find("the victim fails"), std::string::npos);
}

// Two groups that go right and up by 3 and 4 from the anchor: the mean change is (1.5, 2), of cosines 0.6 and 0.8.
TEST(Measures, AreTheNormsOfChangesAndTheirCosinesToTheMean) {
  for (const auto& options : {topology::LayoutOptions{.groups = 2, .replicate_degree = 2},
                              topology::LayoutOptions{.groups = std::vector<int>{1, 3}}}) {
    const auto layout = topology::Layout::make(4, options);
    const nn::Model model = tiny_model({});
    const Aftermath aftermath =
        on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
          const topology::Coordinates at = layout.at(rank);
          shard::StateRegistry registry;
          shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {}, registry);
          FederationOptions measured;
          measured.measures = true;
          Federation federation(layout, rank, measured, engine, axes, client, registry);
          set_parameters(engine, [](std::int64_t) { return 0.0f; });
          federation.set_anchor();
          set_parameters(engine, [&](std::int64_t index) {
            return at.group == 0 && index == 1 ? 3.0f : at.group == 1 && index == 50 ? 4.0f : 0.0f;
          });
          federation.run_round({.round = 1, .step = 1, .tokens = 1});
        });
    ASSERT_EQ(aftermath.rounds.size(), 1U);
    const nlohmann::json& round = aftermath.rounds[0];
    EXPECT_EQ(round["change_norm"], (std::vector<double>{3, 4}));
    EXPECT_NEAR(round["cosine"][0].get<double>(), 0.6, 1e-12);
    EXPECT_NEAR(round["cosine"][1].get<double>(), 0.8, 1e-12);
  }
}

}  // namespace
}  // namespace fedshard::federation
