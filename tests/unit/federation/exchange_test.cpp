#include "fedshard/federation/exchange.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <random>

#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using Values = std::vector<float>;  // of the whole model, by global index

plan::ModelPlan plan_of(const std::vector<std::int64_t>& unit_numel) {
  plan::ModelPlan plan;
  for (std::size_t u = 0; u < unit_numel.size(); ++u) {
    const std::string name = "unit" + std::to_string(u);
    plan.units.push_back({name, {{name + ".p", {unit_numel[u]}, {}}}});
    plan.stages.push_back({name, {static_cast<int>(u)}});
  }
  return plan;
}

std::vector<plan::ModelPlan> plans() {
  std::mt19937 random(3);
  std::vector<std::int64_t> sizes;
  for (int u = 0; u < 6; ++u) sizes.push_back(1 + static_cast<std::int64_t>(random() % 200));
  return {plan_of({1}), plan_of({2}), plan_of({97}), plan_of({2, 1, 13, 1, 101, 2}), plan_of(sizes)};
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int groups = 1; groups <= 4; ++groups) {
    for (int replicas = 1; replicas <= 3; ++replicas) {
      for (int shards = 1; shards <= 4; ++shards) all.push_back({groups, replicas, shards});
    }
  }
  return all;
}

// Of 2 to 4 groups, none like the others: in their sizes, their shards, their replicas or all of them.
std::vector<topology::Layout> unequal_layouts(int groups) {
  using List = std::vector<int>;
  const auto make = [](const List& shards, const List& replicas) {
    List sizes;
    int world = 0;
    for (std::size_t g = 0; g < shards.size(); ++g) {
      sizes.push_back(shards[g] * replicas[g]);
      world += sizes.back();
    }
    return topology::Layout::make(world, {.groups = sizes, .shard_degree = shards, .replicate_degree = replicas});
  };
  if (groups == 2) return {make({1, 3}, {1, 1}), make({4, 3}, {1, 1}), make({2, 2}, {1, 3}), make({3, 2}, {2, 3})};
  if (groups == 3) return {make({4, 2, 2}, {1, 1, 1}), make({1, 5, 2}, {3, 1, 2}), make({1, 1, 1}, {1, 2, 3})};
  return {make({1, 2, 3, 4}, {1, 1, 1, 1}), make({13, 1, 2, 7}, {1, 2, 2, 1})};
}

// Magnitudes from 2^-10 to 2^10, so that sums with weights of a few bits are exact in fp64.
Values random_values(std::int64_t numel, int group) {
  std::mt19937 random(static_cast<unsigned>(1000 + group));
  Values values;
  for (std::int64_t i = 0; i < numel; ++i) {
    const float mantissa = std::uniform_real_distribution<float>(-1, 1)(random);
    values.push_back(std::ldexp(mantissa, static_cast<int>(random() % 21) - 10));
  }
  return values;
}

// Rounds to the arena's dtype.
void write(const plan::ModelPlan& plan, const Values& values, const shard::Arena& arena) {
  const at::Tensor all = at::tensor(values, at::kFloat);
  for (int u = 0; u < arena.map().units(); ++u) {
    const topology::Range held = arena.map().range(u);
    arena.real(u).copy_(all.narrow(0, plan.global_offset(u) + held.begin, held.size()));
  }
}

void expect_holds(const plan::ModelPlan& plan, const Values& values, const shard::Arena& arena) {
  const shard::Arena expected(arena.map(), arena.dtype());  // its padding and gaps are zero
  write(plan, values, expected);
  EXPECT_TRUE(same_bits(arena.flat(), expected.flat()));
}

struct Case {
  topology::Layout layout;
  plan::ModelPlan plan;
  std::vector<Values> by_group;
  std::vector<double> weights;
  at::ScalarType dtype = at::kFloat;
  topology::ExchangeRules rules = {};
};

struct Outcome {
  comm::Traffic traffic;
  std::vector<double> square_distances;  // by group
};

// Every rank takes part in one exchange; `check` sees the mean spread over an arena of its own.
Outcome exchange(const Case& c, const std::function<void(const shard::Arena&)>& check) {
  const topology::Layout& layout = c.layout;
  std::mutex mutex;
  Outcome outcome;
  outcome.square_distances.resize(static_cast<std::size_t>(layout.groups()));
  outcome.traffic = testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const topology::Coordinates at = layout.at(rank);
    const shard::ArenaMap map(c.plan, layout.group(at.group).shards, at.shard);
    const shard::Arena parameters(map, c.dtype), spread(map, c.dtype);
    write(c.plan, c.by_group[static_cast<std::size_t>(at.group)], parameters);
    const at::Tensor before = parameters.flat().clone();
    Exchange exchange(layout, rank, c.plan, map, axes, c.rules);
    const at::Tensor mean = exchange.mean_of(parameters, c.weights, comm::Purpose::aggregate);
    EXPECT_EQ(mean.numel(), exchange.slice_numel());
    exchange.spread(mean, spread, comm::Purpose::aggregate);
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(same_bits(parameters.flat(), before)) << "the input was written to";
    outcome.square_distances[static_cast<std::size_t>(at.group)] += exchange.square_distance(parameters, mean);
    check(spread);
  });
  return outcome;
}

double weighted_sum(const Case& c, std::int64_t index) {
  double sum = 0;
  for (std::size_t g = 0; g < c.by_group.size(); ++g) {
    sum += c.weights[g] * static_cast<double>(c.by_group[g][static_cast<std::size_t>(index)]);
  }
  return sum;
}

// One exchange with weights of a few bits: the fp64 sum is exact, so there is one right answer, to the bit.
void expect_exact(const topology::Layout& layout, const plan::ModelPlan& plan,
                  const topology::ExchangeRules& rules = {}) {
  SCOPED_TRACE(testing::Message() << layout.describe() << ", " << topology::name_of(rules.scheme) << ", buckets "
                                  << topology::text_of(rules.buckets) << ", " << rules.concurrency << " at once");
  static const std::vector<std::vector<double>> weights{
      {1}, {0.25, 0.75}, {0.5, 0.125, 0.375}, {0.125, 0.25, 0.5, 0.125}};
  const int groups = layout.groups();
  Case c{layout, plan, {}, weights[static_cast<std::size_t>(groups - 1)], at::kFloat, rules};
  const std::int64_t numel = plan.numel();
  for (int g = 0; g < groups; ++g) c.by_group.push_back(random_values(numel, g));
  Values mean;
  for (std::int64_t i = 0; i < numel; ++i) mean.push_back(static_cast<float>(weighted_sum(c, i)));
  const Outcome outcome = exchange(c, [&](const shard::Arena& spread) { expect_holds(plan, mean, spread); });

  const bool naive = rules.scheme == topology::Scheme::naive;
  std::int64_t spread = 0;
  for (const topology::GroupShape& group : layout.shapes()) spread += naive ? 0 : (group.replicas - 1) * numel * 4;
  EXPECT_EQ(outcome.traffic.inter_group, 2 * (groups - 1) * numel * 4 * (naive ? layout.group(0).replicas : 1));
  EXPECT_EQ(outcome.traffic.intra_group, spread);
  EXPECT_EQ(outcome.traffic.of(comm::Purpose::aggregate), outcome.traffic.inter_group + outcome.traffic.intra_group);
  for (int g = 0; g < groups; ++g) {
    double expected = 0;
    for (std::int64_t i = 0; i < numel; ++i) {
      const auto at = static_cast<std::size_t>(i);
      expected += std::pow(static_cast<double>(c.by_group[static_cast<std::size_t>(g)][at]) - mean[at], 2);
    }
    EXPECT_NEAR(outcome.square_distances[static_cast<std::size_t>(g)], expected, 1e-12 * expected);
  }
}

float in_bf16(float value) { return static_cast<float>(c10::BFloat16(value)); }

// The bf16 number nearest to `exact`, of two the one whose last bit is even: by looking at the neighbours.
float nearest_bf16(double exact) {
  const float start = in_bf16(static_cast<float>(exact));
  float best = start;
  for (const std::int32_t step : {-1, 0, 1}) {
    const auto bits = std::bit_cast<std::uint32_t>(start) + static_cast<std::uint32_t>(step) * 0x10000u;
    const float candidate = std::bit_cast<float>(bits);
    const double off = std::abs(candidate - exact), least = std::abs(best - exact);
    if (off < least || (off == least && (bits & 0x10000u) == 0)) best = candidate;
  }
  return best;
}

TEST(Exchange, Bf16ParametersAreWeighedInFp64AndRoundedOnce) {
  const plan::ModelPlan plan = plan_of({97, 1, 400});
  int only_once = 0;
  for (const Shape& shape : {Shape{2, 1, 3}, {3, 2, 2}, {4, 3, 1}, {2, 1, 1}}) {
    Case c{shape.layout(), plan, {}, {0.25, 0.75}, at::kBFloat16};
    if (shape.groups == 3) c.weights = {0.5, 0.125, 0.375};
    if (shape.groups == 4) c.weights = {0.125, 0.25, 0.5, 0.125};
    for (int g = 0; g < shape.groups; ++g) {
      c.by_group.push_back(random_values(plan.numel(), g));
      for (float& value : c.by_group.back()) value = in_bf16(value);
    }
    // Group 0 adds to a tie what decides it, and is lost where the sum is rounded to fp32 on its way: 3/4 or 3/8 of 87,
    // or 1/4 of 1 and 1/2 of 129, have nine bits.
    for (Values& of_group : c.by_group) of_group[0] = 0;
    c.by_group[0][0] = std::ldexp(1.0f, -40);
    if (shape.groups < 4) c.by_group.back()[0] = 87;
    if (shape.groups == 4) c.by_group[1][0] = 1, c.by_group[2][0] = 129;
    Values mean;
    for (std::int64_t i = 0; i < plan.numel(); ++i) {
      const double exact = weighted_sum(c, i);
      mean.push_back(nearest_bf16(exact));
      only_once += mean.back() != in_bf16(static_cast<float>(exact));
    }
    const Outcome outcome = exchange(c, [&](const shard::Arena& spread) { expect_holds(plan, mean, spread); });
    EXPECT_EQ(outcome.traffic.inter_group, 2 * (shape.groups - 1) * plan.numel() * 2);
    EXPECT_EQ(outcome.traffic.intra_group, shape.groups * (shape.replicas - 1) * plan.numel() * 2);
  }
  EXPECT_GT(only_once, 0) << "no value tells one rounding from two";
}

TEST(Exchange, EveryLayoutGetsTheWeightedMeanRoundedOnce) {
  for (const plan::ModelPlan& plan : plans()) {
    for (const Shape& shape : shapes()) {
      expect_exact(shape.layout(), plan);
      ASSERT_FALSE(testing::Test::HasFailure()) << plan.numel() << " elements";
    }
  }
}

TEST(Exchange, UnequalGroupsGetTheWeightedMeanRoundedOnce) {
  for (const plan::ModelPlan& plan : plans()) {
    for (const int groups : {2, 3, 4}) {
      for (const topology::Layout& layout : unequal_layouts(groups)) expect_exact(layout, plan);
    }
  }
}

using topology::Buckets;
using topology::Scheme;

std::vector<topology::ExchangeRules> rules_for(const topology::Layout& layout) {
  std::vector<topology::ExchangeRules> all;
  for (const Scheme scheme : {Scheme::split, Scheme::leader, Scheme::naive}) {
    bool fits = true;
    for (const auto& group : layout.shapes()) fits = fits && group.replicas == layout.group(0).replicas;
    if (scheme == Scheme::naive && !fits) continue;
    all.push_back({scheme, {}});
    all.push_back({scheme, {Buckets::By::unit}, 1});
    all.push_back({scheme, {Buckets::By::unit}, 2});
    all.push_back({scheme, {Buckets::By::size, 7}, 3});
    all.push_back({scheme, {Buckets::By::size, 50}, 2});
    all.push_back({scheme, {Buckets::By::size, 1}, 5});
  }
  return all;
}

TEST(Exchange, EverySchemeInBucketsOfAnySizeGetsTheSameBits) {
  const plan::ModelPlan plan = plan_of({2, 1, 13, 1, 101, 2});
  std::vector<topology::Layout> layouts;
  for (const Shape& shape : {Shape{1, 1, 1}, {1, 3, 2}, {2, 1, 1}, {2, 2, 2}, {3, 2, 3}, {2, 3, 1}, {4, 1, 5}}) {
    layouts.push_back(shape.layout());
  }
  for (const int groups : {2, 3, 4}) {
    for (const topology::Layout& layout : unequal_layouts(groups)) layouts.push_back(layout);
  }
  for (const topology::Layout& layout : layouts) {
    for (const topology::ExchangeRules& rules : rules_for(layout)) expect_exact(layout, plan, rules);
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

// A broadcast of more than one link of the chain.
TEST(Exchange, ALeadersShardGoesDownTheChainInLinks) {
  expect_exact(Shape{2, 3, 1}.layout(), plan_of({700'001}), {Scheme::leader, {}});
}

// With any weights the sum itself is rounded, but only in fp64; and all layouts get the same bits.
TEST(Exchange, AnyWeightsGiveTheSameBitsInEveryLayout) {
  const plan::ModelPlan plan = plan_of({2, 1, 13, 1, 101, 2});
  Case c{Shape{}.layout(), plan, {}, {0.1, 0.3, 0.6}};
  for (int g = 0; g < 3; ++g) c.by_group.push_back(random_values(plan.numel(), g));
  std::size_t rules = 0;
  Values first(static_cast<std::size_t>(plan.numel()), std::nanf(""));
  std::vector<topology::Layout> layouts = unequal_layouts(3);
  for (const Shape& shape : {Shape{3, 1, 1}, {3, 1, 2}, {3, 2, 1}, {3, 3, 4}, {3, 1, 17}}) {
    layouts.push_back(shape.layout());
  }
  for (const topology::Layout& layout : layouts) {
    SCOPED_TRACE(layout.describe());
    c.layout = layout;
    c.rules = rules_for(layout)[rules++ % rules_for(layout).size()];
    exchange(c, [&](const shard::Arena& spread) {
      for (int u = 0; u < spread.map().units(); ++u) {
        const topology::Range held = spread.map().range(u);
        for (std::int64_t i = 0; i < held.size(); ++i) {
          const std::int64_t index = plan.global_offset(u) + held.begin + i;
          const float got = spread.real(u).const_data_ptr<float>()[i];
          float& seen = first[static_cast<std::size_t>(index)];
          if (std::isnan(seen)) seen = got;
          ASSERT_EQ(got, seen);
          const double exact = weighted_sum(c, index);
          ASSERT_NEAR(got, exact, std::ldexp(std::abs(exact), -24) + 1e-14);
        }
      }
    });
  }
}

// Nothing to agree on: the parameters come back as they were, whatever the weights.
TEST(Exchange, EqualGroupsChangeNothing) {
  constexpr float kMax = std::numeric_limits<float>::max(), kTiny = std::numeric_limits<float>::denorm_min();
  const plan::ModelPlan plan = plan_of({9});
  const Values values{0.0f, -0.0f, kMax, -kMax, kTiny, -kTiny, 1.0f / 3, 0.1f, 1e-38f};
  for (const std::vector<double>& weights :
       {std::vector<double>{1}, {0.5, 0.5}, {1.0 / 3, 1.0 / 3, 1.0 / 3}, {0.1, 0.2, 0.7}, {0, 1}, {1, 0, 0, 0}}) {
    const Case c{Shape{static_cast<int>(weights.size()), 2, 2}.layout(), plan,
                 std::vector<Values>(weights.size(), values), weights};
    const Outcome outcome = exchange(c, [&](const shard::Arena& spread) { expect_holds(plan, values, spread); });
    for (const double square : outcome.square_distances) EXPECT_EQ(square, 0);
  }
}

// A constant by group shows at a glance that the mean is a mean and no sum.
TEST(Exchange, ConstantsOfTheGroupsAreAveragedNotSummed) {
  const plan::ModelPlan plan = plan_of({7, 1});
  const Case c{Shape{4, 1, 2}.layout(),
               plan,
               {Values(8, 0), Values(8, 1), Values(8, 2), Values(8, 3)},
               {0.25, 0.25, 0.25, 0.25}};
  exchange(c, [&](const shard::Arena& spread) { expect_holds(plan, Values(8, 1.5f), spread); });
}

TEST(Exchange, MoreShardsThanElements) {
  expect_exact(Shape{3, 2, 5}.layout(), plan_of({1, 2, 3}));
  expect_exact(Shape{2, 1, 13}.layout(), plan_of({1}));
}

TEST(Exchange, MaySpreadOverItsOwnInput) {
  const plan::ModelPlan plan = plan_of({13, 4});
  const topology::Layout layout = Shape{2, 2, 2}.layout();
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const topology::Coordinates at = layout.at(rank);
    const shard::ArenaMap map(plan, 2, at.shard);
    const shard::Arena parameters(map);
    Exchange exchange(layout, rank, plan, map, axes);
    const std::vector<double> weights{0.5, 0.5};
    for (int round = 1; round <= 3; ++round) {
      write(plan, Values(17, static_cast<float>(round * (at.group + 1))), parameters);
      exchange.spread(exchange.mean_of(parameters, weights, comm::Purpose::aggregate), parameters,
                      comm::Purpose::aggregate);
      expect_holds(plan, Values(17, 1.5f * static_cast<float>(round)), parameters);
    }
  });
}

}  // namespace
}  // namespace fedshard::federation
