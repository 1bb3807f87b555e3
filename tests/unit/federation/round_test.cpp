#include "fedshard/federation/round.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "fedshard/plan/group_local.h"
#include "fedshard/shard/digest.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using testing_support::tiny_model;
using testing_support::tiny_value;

// One rank's engine and federation.
struct Member {
  Member(const topology::Layout& layout, int rank, const nn::Model& model, comm::Axes& axes,
         control::CoordinatorClient& client, FederationOptions options = {})
      : engine(model, layout.group(layout.group_of(rank)).shards, layout.at(rank).shard, axes, {}, registry),
        federation(layout, rank, options, engine, axes, client, registry) {}
  shard::StateRegistry registry;
  shard::Engine engine;
  Federation federation;
};

// The parameters that group `group` brings to a round. Multiples of 2^-10: their sums with weights of a few bits are
// exact in fp64.
float brought(std::int64_t index, int group, std::int64_t round) {
  return std::round(tiny_value(index + 31 * group + 101 * round) * 1024) / 1024;
}

std::uint64_t digest_of(const plan::ModelPlan& plan, const std::function<float(std::int64_t)>& value) {
  const shard::ArenaMap map(plan, 1, 0);
  const shard::Arena arena(map);
  arena.flat().copy_(arena_of(plan, map, value));
  return shard::partial_digest(plan, arena);
}

struct RoundCase {
  std::vector<std::int64_t> tokens;  // by group
  std::vector<double> weights;
};

void expect_rounds(const Shape& shape, const std::vector<RoundCase>& cases, WeighBy by) {
  const topology::Layout layout = shape.layout();
  const nn::Model model = tiny_model({});
  const auto mean = [&](std::int64_t round) {
    return [&, round](std::int64_t index) {
      double sum = 0;
      for (int g = 0; g < shape.groups; ++g) {
        sum +=
            cases[static_cast<std::size_t>(round - 1)].weights[static_cast<std::size_t>(g)] * brought(index, g, round);
      }
      return static_cast<float>(sum);
    };
  };
  const auto last = static_cast<std::int64_t>(cases.size());
  const Aftermath aftermath = on_federated_ranks(layout, [&](int rank, comm::Axes& axes,
                                                             control::CoordinatorClient& client) {
    FederationOptions options;
    options.weights.by = by;
    Member member(layout, rank, model, axes, client, options);
    const int group = layout.group_of(rank);
    for (std::int64_t round = 1; round <= last; ++round) {
      const RoundCase& c = cases[static_cast<std::size_t>(round - 1)];
      set_parameters(member.engine, [&](std::int64_t index) { return brought(index, group, round); });
      const RoundOutcome outcome = member.federation.run_round({.round = round,
                                                                .step = 10 * round,
                                                                .tokens = c.tokens[static_cast<std::size_t>(group)],
                                                                .wants_stop = round == last && rank == 0});
      EXPECT_EQ(outcome.weights, c.weights);
      EXPECT_EQ(outcome.stop, round == last);
      EXPECT_GE(outcome.seconds, 0);
      EXPECT_EQ(outcome.digest, digest_of(model.plan, mean(round)));
      EXPECT_TRUE(same_bits(member.engine.parameters().flat(), arena_of(model.plan, member.engine.map(), mean(round))));
    }
  });
  EXPECT_EQ(aftermath.errors, std::vector<std::string>(static_cast<std::size_t>(layout.world())));
  EXPECT_EQ(aftermath.status.rejected_frames, 0) << aftermath.status.last_rejection;
  ASSERT_EQ(std::ssize(aftermath.rounds), last) << shape;
  for (std::int64_t round = 1; round <= last; ++round) {
    const nlohmann::json& record = aftermath.rounds[static_cast<std::size_t>(round - 1)];
    EXPECT_EQ(record["step"], 10 * round);
    EXPECT_EQ(record["weights"], cases[static_cast<std::size_t>(round - 1)].weights);
    EXPECT_EQ(record["digest"], fmt::format("{:016x}", digest_of(model.plan, mean(round))));
    for (int g = 0; g < shape.groups; ++g) {
      double square = 0;
      for (std::int64_t i = 0; i < model.plan.numel(); ++i)
        square += std::pow(brought(i, g, round) - mean(round)(i), 2);
      EXPECT_NEAR(record["drift"][static_cast<std::size_t>(g)].get<double>(), std::sqrt(square),
                  1e-6 * std::sqrt(square));
    }
  }
}

TEST(Round, GivesEveryRankOfEveryLayoutTheMeanAndTheSameDigest) {
  const std::vector<std::vector<RoundCase>> cases{
      {{{5}, {1}}, {{1}, {1}}, {{7}, {1}}},
      {{{3, 1}, {0.75, 0.25}}, {{0, 9}, {0, 1}}, {{8, 8}, {0.5, 0.5}}},
      {{{2, 1, 1}, {0.5, 0.25, 0.25}}, {{0, 0, 4}, {0, 0, 1}}, {{5, 1, 2}, {0.625, 0.125, 0.25}}}};
  for (int groups = 1; groups <= 3; ++groups) {
    for (int replicas = 1; replicas <= 2; ++replicas) {
      for (int shards = 1; shards <= 3; ++shards) {
        const Shape shape{groups, replicas, shards};
        expect_rounds(shape, cases[static_cast<std::size_t>(groups - 1)], WeighBy::tokens);
        ASSERT_FALSE(testing::Test::HasFailure()) << shape;
      }
    }
  }
}

TEST(Round, MoreShardsThanElementsOfSomeUnits) { expect_rounds({2, 1, 7}, {{{1, 1}, {0.5, 0.5}}}, WeighBy::tokens); }

TEST(Round, UniformWeightsIgnoreTheTokens) {
  expect_rounds({4, 1, 1}, {{{1, 0, 50, 7}, {0.25, 0.25, 0.25, 0.25}}, {{0, 0, 0, 0}, {0.25, 0.25, 0.25, 0.25}}},
                WeighBy::group);
}

TEST(Round, OfOneGroupChangesNoBit) {
  const topology::Layout layout = Shape{1, 2, 2}.layout();
  const nn::Model model = tiny_model({.tied = true});
  const auto value = [](std::int64_t index) { return index % 5 == 0 ? -0.0f : tiny_value(index) / 3; };
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        Member member(layout, rank, model, axes, client);
        set_parameters(member.engine, value);
        member.federation.run_round({.round = 1, .step = 1, .tokens = 3});
        EXPECT_TRUE(same_bits(member.engine.parameters().flat(), arena_of(model.plan, member.engine.map(), value)));
      });
  EXPECT_EQ(aftermath.status.rounds, 1);
}

// Nobody can say what such a group's model is, so it has no part in the average; afterwards it has one again.
TEST(Round, LeavesOutAGroupWhoseReplicasDiffer) {
  const topology::Layout layout = Shape{2, 2, 2}.layout();
  const nn::Model model = tiny_model({});
  const Aftermath aftermath = on_federated_ranks(layout, [&](int rank, comm::Axes& axes,
                                                             control::CoordinatorClient& client) {
    Member member(layout, rank, model, axes, client);
    const topology::Coordinates at = layout.at(rank);
    set_parameters(member.engine, [&](std::int64_t index) {
      return at.group == 1 && at.replica == 1 && index == 40 ? 0.25f : tiny_value(index) + static_cast<float>(at.group);
    });
    const RoundOutcome outcome = member.federation.run_round({.round = 1, .step = 1, .tokens = 3});
    EXPECT_EQ(outcome.left_out, std::vector<int>{1});
    EXPECT_EQ(outcome.weights, (std::vector<double>{1, 0}));
    EXPECT_TRUE(same_bits(member.engine.parameters().flat(), arena_of(model.plan, member.engine.map(), tiny_value)));
  });
  ASSERT_EQ(aftermath.rounds.size(), 1U);
  EXPECT_EQ(aftermath.rounds[0]["left_out"], std::vector<int>{1});
}

// One 1-element parameter is exchanged, so that most ranks bring nothing; the others' values are each group's own.
TEST(Round, LeavesGroupLocalParametersToTheirGroups) {
  for (const auto kind : {plan::Compression::Kind::none, plan::Compression::Kind::int8}) {
    const topology::Layout layout = topology::Layout::make(
        7, {.groups = std::vector<int>{4, 3}, .shard_degree = std::vector<int>{2, 3}, .replicate_degree = -1});
    nn::Model model = tiny_model({});
    model.plan = plan::keep_in_groups(model.plan, {{"block1.gain"}, {}});
    const auto& units = model.plan.units;
    const auto unit = std::find_if(units.begin(), units.end(), [](const auto& u) { return u.is_exchanged(); });
    const std::int64_t exchanged = model.plan.global_runs(static_cast<int>(unit - units.begin()), {0, 1}).at(0).index;
    FederationOptions options;
    options.outer = plan::usual_options(plan::Outer::nesterov);
    options.compression = plan::usual_compression(kind);
    const Aftermath aftermath =
        on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
          Member member(layout, rank, model, axes, client, options);
          const int group = layout.group_of(rank);
          set_parameters(member.engine, [](std::int64_t index) { return brought(index, 0, 1); });
          member.federation.set_anchor();
          const auto own = [&](std::int64_t index) {
            return index == exchanged ? brought(index, 0, 1) - 0.25f : brought(index, group, 2);
          };
          set_parameters(member.engine, own);
          const at::Tensor evaluated = member.federation.mean_parameters(1).flat();
          EXPECT_TRUE(same_bits(evaluated, arena_of(model.plan, member.engine.map(), own)));
          member.federation.run_round({.round = 1, .step = 1, .tokens = 1});
          const auto after = [&](std::int64_t index) {
            return index == exchanged ? brought(index, 0, 1) - 0.7f * 1.9f * 0.25f : own(index);
          };
          EXPECT_TRUE(at::allclose(member.engine.parameters().flat(), arena_of(model.plan, member.engine.map(), after),
                                   0, 1e-6));
        });
    for (const std::string& error : aftermath.errors) EXPECT_EQ(error, "");
    ASSERT_EQ(aftermath.rounds.size(), 1U);
    EXPECT_NEAR(aftermath.rounds[0]["drift"][0].get<double>(), 0, 1e-6);
  }
}

TEST(Round, OfAnOuterStepThatLeadsToInfinityEndsTheRun) {
  const topology::Layout layout = Shape{2, 1, 1}.layout();
  const nn::Model model = tiny_model({});
  FederationOptions options;
  options.outer = plan::usual_options(plan::Outer::nesterov);
  options.outer.lr = 1e300;
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        Member member(layout, rank, model, axes, client, options);
        set_parameters(member.engine, tiny_value);
        member.federation.set_anchor();
        set_parameters(member.engine, [](std::int64_t index) { return tiny_value(index) * 1.01f; });
        member.federation.run_round({.round = 1, .step = 1, .tokens = 3});
      });
  EXPECT_NE(
      aftermath.status.first_error->message.find("round 1: the outer step leads to parameters that are not finite"),
      std::string::npos);
  EXPECT_EQ(aftermath.status.first_error->status, 1);
}

// --- a round happens for everyone or not at all

// A good round; then another, which ends with an error on every rank and leaves the parameters as they were before it.
Aftermath expect_untouched(const Shape& shape, const std::function<void(int rank, comm::Axes&)>& prepare,
                           const std::function<RoundInput(int rank)>& input) {
  const topology::Layout layout = shape.layout();
  const nn::Model model = tiny_model({});
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        if (prepare) prepare(rank, axes);
        Member member(layout, rank, model, axes, client);
        const int group = layout.group_of(rank);
        const auto bring = [&](std::int64_t round) {
          set_parameters(member.engine, [&](std::int64_t index) { return brought(index, group, round); });
        };
        bring(1);
        member.federation.run_round({.round = 1, .step = 1, .tokens = 4});
        bring(2);
        const at::Tensor before = member.engine.parameters().flat().clone();
        try {
          member.federation.run_round(input(rank));
        } catch (const base::Error&) {
          EXPECT_TRUE(same_bits(member.engine.parameters().flat(), before)) << "rank " << rank;
          throw;
        }
      });
  for (const std::string& error : aftermath.errors) EXPECT_NE(error, "");
  EXPECT_EQ(aftermath.status.rounds, 1);
  return aftermath;
}

RoundInput second_round(int) { return {.round = 2, .step = 2, .tokens = 4}; }

TEST(RoundFailure, BeforeReadyLeavesTheOldParametersEverywhere) {
  enum class When { before_sending, before_returning, when_all_is_known };
  for (const Shape& shape : {Shape{2, 1, 1}, Shape{2, 2, 2}, Shape{3, 1, 2}}) {
    for (const When when : {When::before_sending, When::before_returning, When::when_all_is_known}) {
      const int victim = shape.layout().world() - 1;
      // A round has two exchanges; 3 and 4 are the second round's.
      const auto die = [](int due) {
        return [due](int number) {
          if (number == due) base::fail<base::RunError>("the victim fails");
        };
      };
      const Aftermath aftermath = expect_untouched(
          shape,
          [&](int rank, comm::Axes& axes) {
            if (rank != victim) return;
            hook(axes.federation, when == When::before_sending     ? Hooks{.before_exchange = die(3)}
                                  : when == When::before_returning ? Hooks{.before_exchange = die(4)}
                                                                   : Hooks{.after_exchange = die(4)});
          },
          second_round);
      ASSERT_TRUE(aftermath.status.first_error) << shape;
      EXPECT_EQ(aftermath.status.first_error->rank, victim);
      EXPECT_NE(aftermath.status.first_error->message.find("the victim fails"), std::string::npos)
          << aftermath.status.first_error->message;
      ASSERT_FALSE(testing::Test::HasFailure()) << shape << ", when " << static_cast<int>(when);
    }
  }
}

TEST(RoundFailure, OfRanksOutOfStepLeavesTheOldParameters) {
  const Aftermath aftermath = expect_untouched(
      {2, 1, 2}, nullptr, [](int rank) { return RoundInput{.round = rank == 3 ? 3 : 2, .step = 2, .tokens = 4}; });
  EXPECT_NE(aftermath.status.first_error->message.find("out of step"), std::string::npos)
      << aftermath.status.first_error->message;
}

// --- different parameters are found

// One round in which `rank` gets something wrong; returns what everybody says.
Aftermath tampered_round(const Shape& shape, int rank_tampered, const std::function<void(comm::Axes&)>& tamper) {
  const topology::Layout layout = shape.layout();
  const nn::Model model = tiny_model({});
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        if (rank == rank_tampered) tamper(axes);
        Member member(layout, rank, model, axes, client);
        set_parameters(member.engine, [&](std::int64_t index) { return brought(index, layout.group_of(rank), 1); });
        member.federation.run_round({.round = 1, .step = 1, .tokens = 4});
        ADD_FAILURE() << "rank " << rank << " has not noticed";
      });
  EXPECT_EQ(aftermath.status.rounds, 0);
  return aftermath;
}

TEST(RoundFailure, FindsAReplicaThatReceivedOneWrongBit) {
  const Shape shape{2, 2, 2};
  for (const int victim : {0, 2, 7}) {
    const Aftermath aftermath = tampered_round(shape, victim, [](comm::Axes& axes) {
      hook(axes.replica, {.change_gathered = [](const at::Tensor& all) {
             flip_lowest_bit(all.mutable_data_ptr<float>()[all.numel() - 1]);
           }});
    });
    const std::vector<int> replicas = shape.layout().replica_peers(victim);
    // Whichever of them is first leaves, and the other may then see no more than that.
    const auto notices = [&](int rank) {
      return aftermath.errors[static_cast<std::size_t>(rank)].find(
                 fmt::format("ranks {} and {} are replicas of one shard but hold different parameters", replicas[0],
                             replicas[1])) != std::string::npos;
    };
    EXPECT_TRUE(notices(replicas[0]) || notices(replicas[1]))
        << aftermath.errors[static_cast<std::size_t>(replicas[0])] << "\n"
        << aftermath.errors[static_cast<std::size_t>(replicas[1])];
  }
}

// No later round would mend them, so a round that leaves them out looks all the same.
TEST(RoundFailure, FindsReplicasWhoseGroupLocalParametersDiffer) {
  const topology::Layout layout = Shape{2, 2, 1}.layout();
  nn::Model model = tiny_model({});
  model.plan = plan::keep_in_groups(model.plan, {{}, {"table"}});
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        Member member(layout, rank, model, axes, client);
        set_parameters(member.engine, [&](std::int64_t index) {
          return rank == 3 && index == 40 ? 0.25f : tiny_value(index) + static_cast<float>(layout.group_of(rank));
        });
        member.federation.run_round({.round = 1, .step = 1, .tokens = 3});
      });
  ASSERT_TRUE(aftermath.status.first_error);
  EXPECT_NE(aftermath.status.first_error->message.find("ranks 2 and 3 are replicas of one shard but hold different"),
            std::string::npos)
      << aftermath.status.first_error->message;
  EXPECT_EQ(aftermath.status.first_error->status, 1);
}

TEST(RoundFailure, FindsAGroupThatReceivedOneWrongBit) {
  for (const Shape& shape : {Shape{2, 1, 1}, Shape{2, 2, 2}, Shape{3, 1, 2}}) {
    const Aftermath aftermath = tampered_round(shape, 0, [](comm::Axes& axes) {
      hook(axes.federation, {.change_received = [](int number, std::vector<comm::Parcel>& received) {
             if (number == 2) flip_lowest_bit(received.front().buffer.mutable_data_ptr<float>()[0]);
           }});
    });
    ASSERT_TRUE(aftermath.status.first_error);
    EXPECT_NE(aftermath.status.first_error->message.find("do not hold the same parameters"), std::string::npos)
        << aftermath.status.first_error->message;
  }
}

// --- the mean in mid-round

TEST(MeanParameters, AreTheWeightedMeanAndTouchNothing) {
  for (const Shape& shape : {Shape{1, 1, 2}, Shape{2, 1, 1}, Shape{2, 2, 2}, Shape{3, 2, 1}}) {
    const topology::Layout layout = shape.layout();
    const nn::Model model = tiny_model({});
    const auto mean_of = [&](const std::vector<double>& weights) {
      return [&, weights](std::int64_t index) {
        double sum = 0;
        for (int g = 0; g < shape.groups; ++g) sum += weights[static_cast<std::size_t>(g)] * brought(index, g, 1);
        return static_cast<float>(sum);
      };
    };
    const Aftermath aftermath =
        on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
          Member member(layout, rank, model, axes, client);
          const int group = layout.group_of(rank);
          const auto own = [&](std::int64_t index) { return brought(index, group, 1); };
          const auto expect = [&](std::int64_t tokens, const std::function<float(std::int64_t)>& expected) {
            const shard::Arena mean = member.federation.mean_parameters(tokens);
            EXPECT_TRUE(same_bits(mean.flat(), arena_of(model.plan, member.engine.map(), expected))) << shape;
            EXPECT_TRUE(same_bits(member.engine.parameters().flat(), arena_of(model.plan, member.engine.map(), own)));
          };
          set_parameters(member.engine, own);
          const std::vector<std::vector<double>> by_tokens{{1}, {0.25, 0.75}, {0.125, 0.375, 0.5}};
          const std::vector<std::vector<std::int64_t>> tokens{{6}, {1, 3}, {1, 3, 4}};
          const auto at = static_cast<std::size_t>(shape.groups - 1);
          expect(tokens[at][static_cast<std::size_t>(group)], mean_of(by_tokens[at]));
          // Only the last group has trained.
          std::vector<double> last(static_cast<std::size_t>(shape.groups), 0);
          last.back() = 1;
          expect(group == shape.groups - 1 ? 5 : 0, mean_of(last));
          expect(0, own);
        });
    EXPECT_EQ(aftermath.traffic.of(comm::Purpose::aggregate), 0);
    const std::int64_t once = (2 * (shape.groups - 1) + shape.groups * (shape.replicas - 1)) * model.plan.numel() * 4;
    EXPECT_EQ(aftermath.traffic.of(comm::Purpose::state), 2 * once);
  }
}

}  // namespace
}  // namespace fedshard::federation
