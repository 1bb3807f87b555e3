#include "fedshard/federation/moments.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "fedshard/federation/round.h"
#include "fedshard/plan/group_local.h"
#include "fedshard/plan/updates.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using testing_support::tiny_model;
using testing_support::tiny_value;
using Value = std::function<float(std::int64_t index)>;

// Multiples of 2^-10: their sums with weights of a few bits are exact in fp64. `moment`: the first or the second.
float moment_at(std::int64_t index, int group, int moment) {
  return std::round(tiny_value(index + 31 * group + 57 * moment) * 1024) / 1024;
}

void fill(const plan::ModelPlan& plan, const shard::Arena& arena, const Value& value) {
  for (const shard::ArenaPiece& piece : arena.map().pieces()) {
    fill_by_index(plan, piece.unit, piece.range, arena.slice(piece.unit, piece.range).mutable_data_ptr<float>(), value);
  }
}

void expect_pieces(const plan::ModelPlan& plan, const shard::Arena& arena, const Value& local, const Value& mean) {
  for (const shard::ArenaPiece& piece : arena.map().pieces()) {
    std::vector<float> expected(static_cast<std::size_t>(piece.range.size()));
    fill_by_index(plan, piece.unit, piece.range, expected.data(), arena.map().group_local(piece.unit) ? local : mean);
    const at::Tensor held = arena.slice(piece.unit, piece.range);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(held.const_data_ptr<float>()[i], expected[i]) << "unit " << piece.unit << ", element " << i;
    }
  }
}

std::vector<double> weights_of_few_bits(int groups) {
  std::vector<double> weights(static_cast<std::size_t>(groups), 0.25);
  weights[0] = 1 - 0.25 * (groups - 1);
  return weights;
}

// As Muon has them: a first moment of every element that trains, and a second one of some matrices' and all vectors'.
void expect_averaged(const topology::Layout& layout, const plan::ModelPlan& plan,
                     const topology::ExchangeRules& exchange_rules) {
  const std::vector<double> weights = weights_of_few_bits(layout.groups());
  const plan::UpdateRules rules = plan::update_rules(plan, {.update = plan::Update::muon});
  const comm::Traffic traffic = testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const topology::Coordinates at = layout.at(rank);
    const int shards = layout.group(at.group).shards;
    const shard::ArenaMap whole(plan, shards, at.shard, shard::ArenaRoom::trained_units);
    const shard::ArenaMap some(whole, plan::moment_ranges(plan, rules, 2, shards, at.shard));
    const shard::Arena first(whole), second(some);
    shard::StateRegistry registry;
    registry.add("exp_avg", shard::Role::moments, shard::Scope::group, first);
    registry.add("exp_avg_sq", shard::Role::moments, shard::Scope::group, second);
    const auto mine = [&](int moment) {
      return [&, moment](std::int64_t index) { return moment_at(index, at.group, moment); };
    };
    fill(plan, first, mine(1));
    fill(plan, second, mine(2));
    MomentsAverage average(layout, rank, plan, axes, exchange_rules, registry);
    // Of 10, 20, 30 ... updates.
    double updates = 0;
    for (int g = 0; g < layout.groups(); ++g) updates += weights[static_cast<std::size_t>(g)] * 10 * (g + 1);
    EXPECT_EQ(average.exchange(10 * (at.group + 1), weights), std::llround(updates));
    expect_pieces(plan, first, mine(1), mine(1));
    expect_pieces(plan, second, mine(2), mine(2));
    average.commit();
    for (const int moment : {1, 2}) {
      const auto mean = [&](std::int64_t index) {
        double sum = 0;
        for (int g = 0; g < layout.groups(); ++g) {
          sum += weights[static_cast<std::size_t>(g)] * moment_at(index, g, moment);
        }
        return static_cast<float>(sum);
      };
      expect_pieces(plan, moment == 1 ? first : second, mine(moment), mean);
    }
  });
  std::int64_t between = 2 * (layout.groups() - 1) * plan::exchanged_moments(plan, rules) * 4;
  if (exchange_rules.scheme == topology::Scheme::naive) between *= layout.group(0).replicas;
  // Beside a number a rank about updates.
  const std::int64_t numbers = traffic.of(comm::Purpose::control);
  EXPECT_GE(traffic.inter_group, between);
  EXPECT_LE(traffic.inter_group, between + numbers);
}

TEST(MomentsAverage, IsTheMeanInEveryLayoutAndScheme) {
  using List = std::vector<int>;
  using topology::Layout;
  const plan::ModelPlan plan = tiny_model({}).plan;
  const plan::ModelPlan partly_local = plan::keep_in_groups(plan, {{}, {"table", "*.up"}});
  const std::vector<Layout> layouts{
      Layout::make(2, {.groups = 2}),
      Layout::make(4, {.groups = List{1, 3}}),
      Layout::make(6, {.groups = 3, .shard_degree = 1, .replicate_degree = 2}),
      Layout::make(6, {.groups = List{4, 2}, .shard_degree = List{2, 1}, .replicate_degree = -1}),
      Layout::make(15, {.groups = List{13, 2}}),
  };
  const topology::Buckets small{topology::Buckets::By::size, 16};
  for (const Layout& layout : layouts) {
    for (const plan::ModelPlan& model : {plan, partly_local}) {
      SCOPED_TRACE(layout.describe());
      expect_averaged(layout, model, {});
      expect_averaged(layout, model, {.scheme = topology::Scheme::leader, .buckets = small});
      if (layout.equal_groups()) expect_averaged(layout, model, {.scheme = topology::Scheme::naive});
      ASSERT_FALSE(testing::Test::HasFailure());
    }
  }
}

TEST(MomentsAverage, NeedsMoments) {
  const topology::Layout layout = topology::Layout::make(2, {.groups = 2});
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const shard::StateRegistry none;
    EXPECT_THROW(MomentsAverage(layout, rank, tiny_model({}).plan, axes, {}, none), base::UsageError);
  });
}

// A group whose parameters are sound, but not what its next step would come from.
TEST(MomentsAverage, AGroupWithMomentsThatAreNotFiniteIsLeftOut) {
  const topology::Layout layout = topology::Layout::make(3, {.groups = 3});
  const nn::Model model = tiny_model({});
  FederationOptions options;
  options.average_moments = true;
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        shard::StateRegistry registry;
        shard::Engine engine(model, 1, 0, axes, {}, registry);
        const shard::Arena moment(engine.map());
        registry.add("momentum_buffer", shard::Role::moments, shard::Scope::group, moment);
        Federation federation(layout, rank, options, engine, axes, client, registry);
        set_parameters(engine, tiny_value);
        fill(model.plan, moment, [&](std::int64_t index) {
          return rank == 1 && index == 5 ? std::numeric_limits<float>::infinity() : 4.0f * static_cast<float>(rank);
        });
        const RoundOutcome outcome =
            federation.run_round({.round = 1, .step = 8, .tokens = 3, .updates = 8 - 2 * rank});
        EXPECT_EQ(outcome.left_out, std::vector<int>{1});
        EXPECT_EQ(outcome.updates, 6);  // of 8 and 4
        expect_pieces(model.plan, moment, nullptr, [](std::int64_t) { return 4.0f; });
      });
  ASSERT_EQ(aftermath.rounds.size(), 1u);
}

}  // namespace
}  // namespace fedshard::federation
