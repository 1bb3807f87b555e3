// Rounds of random layouts, groups of any sizes and degrees among them, against the groups' whole models in fp64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "fedshard/federation/round.h"
#include "fedshard/plan/group_local.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using plan::Outer;
using testing_support::tiny_model;
using testing_support::tiny_value;
using Values = std::vector<double>;  // of the whole model

constexpr int kRounds = 3;

struct Draw {
  topology::Layout layout;
  FederationOptions options;
  std::vector<std::vector<std::int64_t>> tokens;  // by round and group
  int bad_group = -1;                             // brings a NaN to the second round
  bool tied = false;
  plan::ExchangePatterns patterns = {};
  bool pairs_replicas() const {
    return std::all_of(layout.shapes().begin(), layout.shapes().end(),
                       [&](const auto& group) { return group.replicas == layout.group(0).replicas; });
  }
};

// From everything to a single element.
const std::vector<plan::ExchangePatterns> kPatterns{
    {}, {{}, {"*gain", "table"}}, {{"gain"}, {}}, {{"block*"}, {"*.up"}}, {{}, {"block1.*"}}};

Draw draw(unsigned seed) {
  std::mt19937 random(seed);
  const auto upto = [&](int most) { return 1 + static_cast<int>(random() % static_cast<unsigned>(most)); };
  std::vector<int> sizes, shards, replicas;
  int world = 0;
  const int groups = upto(4);
  for (int g = 0; g < groups; ++g) {
    shards.push_back(upto(4));
    replicas.push_back(shards.back() > 2 ? 1 : upto(2));
    sizes.push_back(shards.back() * replicas.back());
    world += sizes.back();
  }
  Draw d{
      topology::Layout::make(world, {.groups = sizes, .shard_degree = shards, .replicate_degree = replicas}), {}, {}};
  d.options.outer = plan::usual_options(static_cast<Outer>(random() % 6));
  if (upto(3) == 1) d.options.outer.max_norm = 0.3;
  if (upto(4) == 1) d.options.outer.lr = 0;
  d.options.weights.by = static_cast<WeighBy>(random() % 3);
  for (int g = 0; g < groups; ++g) d.options.weights.fixed.push_back(upto(5));
  for (int round = 0; round < kRounds; ++round) {
    d.tokens.emplace_back();
    for (int g = 0; g < groups; ++g) d.tokens.back().push_back(upto(9) - 1);
  }
  if (groups > 1 && upto(3) == 1) d.bad_group = upto(groups) - 1;
  d.tied = upto(2) == 1;
  d.patterns = kPatterns[static_cast<std::size_t>(upto(static_cast<int>(kPatterns.size())) - 1)];
  if (d.patterns.include == std::vector<std::string>{"gain"})
    d.options.guard = 0;  // one element may move 10 times less
  d.options.exchange.scheme = static_cast<topology::Scheme>(random() % (d.pairs_replicas() ? 3 : 2));
  d.options.exchange.buckets.by = static_cast<topology::Buckets::By>(random() % 3);
  d.options.exchange.buckets.numel = upto(100);
  d.options.exchange.concurrency = upto(4);
  return d;
}

// Calls f(index, value) for every element that the rank holds, by global index.
template <class F>
void for_each_element(const shard::Engine& engine, const F& f) {
  for (int u = 0; u < engine.map().units(); ++u) {
    const topology::Range held = engine.map().range(u);
    float* p = engine.parameters().real(u).mutable_data_ptr<float>();
    for (const plan::GlobalRun& run : engine.plan().global_runs(u, held)) {
      for (std::int64_t i = 0; i < run.range.size(); ++i) f(run.index + i, p[run.range.begin - held.begin + i]);
    }
  }
}

// How far group g walks from where it stands at a round's start.
double walked(std::int64_t index, int group, int round) {
  return 0.05 * std::sin(0.7 * static_cast<double>(index) + 2.0 * group + 5.0 * round);
}

// The weights that the round has, said again: shares of those that are sound; equal ones where no share is left.
Values shares_of(const Draw& d, int round) {
  Values shares, present;
  double total = 0, count = 0;
  for (int g = 0; g < d.layout.groups(); ++g) {
    present.push_back(round == 2 && g == d.bad_group ? 0 : 1);
    const auto at = static_cast<std::size_t>(g);
    const double share = d.options.weights.by == WeighBy::tokens  ? static_cast<double>(d.tokens[round - 1][at])
                         : d.options.weights.by == WeighBy::fixed ? d.options.weights.fixed[at]
                                                                  : 1;
    shares.push_back(share * present.back());
    total += shares.back(), count += present.back();
  }
  for (std::size_t g = 0; g < shares.size(); ++g) shares[g] = total > 0 ? shares[g] / total : present[g] / count;
  return shares;
}

// By element of the model, whether rounds exchange it.
std::vector<bool> exchanged_elements(const plan::ModelPlan& plan) {
  std::vector<bool> exchanged(static_cast<std::size_t>(plan.numel()));
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    for (const plan::GlobalRun& run : plan.global_runs(u, {0, plan.units[static_cast<std::size_t>(u)].numel()})) {
      const auto begin = exchanged.begin() + run.index;
      std::fill(begin, begin + run.range.size(), plan.units[static_cast<std::size_t>(u)].is_exchanged());
    }
  }
  return exchanged;
}

// One model and the outer optimizer's state in fp64, as the papers write it (federation/outer.h). Of elements that are
// not exchanged there is nothing to say: they are where their group has walked.
struct Reference {
  std::vector<bool> exchanged;
  Values x, m, v;

  void round(const Draw& d, int number) {
    const Values shares = shares_of(d, number);
    const OuterOptions& o = d.options.outer;
    Values gradient(x.size());
    double square = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (!exchanged[i]) continue;
      double mean = 0;
      for (int g = 0; g < d.layout.groups(); ++g) {
        mean += shares[static_cast<std::size_t>(g)] * (x[i] + walked(static_cast<std::int64_t>(i), g, number));
      }
      gradient[i] = x[i] - mean;
      square += gradient[i] * gradient[i];
    }
    const double factor = o.max_norm > 0 ? std::min(1.0, o.max_norm / std::sqrt(square)) : 1;
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (exchanged[i]) step(o, factor * gradient[i], i);
    }
  }

  // After `rounds` of them.
  double of_group(std::size_t i, int group, int rounds) const {
    if (exchanged[i]) return x[i];
    double value = tiny_value(static_cast<std::int64_t>(i));
    for (int round = 1; round <= rounds; ++round) value += walked(static_cast<std::int64_t>(i), group, round);
    return value;
  }

  void step(const OuterOptions& o, double g, std::size_t i) {
    double direction = g;
    if (o.outer == Outer::fedavgm || o.outer == Outer::nesterov) {
      m[i] = o.momentum * m[i] + g;
      direction = o.outer == Outer::nesterov ? g + o.momentum * m[i] : m[i];
    } else if (o.outer != Outer::fedavg) {
      const double before = v[i], sign = before > g * g ? 1 : before < g * g ? -1 : 0;
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.outer == Outer::fedadam   ? o.beta2 * before + (1 - o.beta2) * g * g
             : o.outer == Outer::fedyogi ? before - (1 - o.beta2) * g * g * sign
                                         : before + g * g;
      direction = m[i] / (std::sqrt(v[i]) + o.tau);
    }
    x[i] -= o.lr * direction;
  }
};

void expect_follows_reference(unsigned seed) {
  const Draw d = draw(seed);
  SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << d.layout.describe() << ", outer "
                                  << static_cast<int>(d.options.outer.outer) << ", bad group " << d.bad_group << ", "
                                  << topology::name_of(d.options.exchange.scheme));
  nn::Model model = tiny_model({.tied = d.tied});
  model.plan = plan::keep_in_groups(model.plan, d.patterns);
  Reference reference;
  reference.exchanged = exchanged_elements(model.plan);
  const auto first_exchanged = static_cast<std::int64_t>(
      std::find(reference.exchanged.begin(), reference.exchanged.end(), true) - reference.exchanged.begin());
  for (std::int64_t i = 0; i < model.plan.numel(); ++i) reference.x.push_back(tiny_value(i));
  reference.m.assign(reference.x.size(), 0);
  reference.v.assign(reference.x.size(), d.options.outer.tau * d.options.outer.tau);
  std::vector<Reference> expected;
  for (int round = 1; round <= kRounds; ++round) {
    reference.round(d, round);
    expected.push_back(reference);
  }
  std::mutex checks;
  const Aftermath aftermath = on_federated_ranks(d.layout, [&](int rank, comm::Axes& axes,
                                                               control::CoordinatorClient& client) {
    const topology::Coordinates at = d.layout.at(rank);
    shard::StateRegistry registry;
    shard::Engine engine(model, d.layout.group(at.group).shards, at.shard, axes, {}, registry);
    Federation federation(d.layout, rank, d.options, engine, axes, client, registry);
    set_parameters(engine, tiny_value);
    federation.set_anchor();
    for (int round = 1; round <= kRounds; ++round) {
      for_each_element(engine, [&](std::int64_t index, float& value) {
        value += static_cast<float>(walked(index, at.group, round));
        if (round == 2 && at.group == d.bad_group && index == first_exchanged) value = std::nanf("");
      });
      const RoundOutcome outcome = federation.run_round(
          {.round = round,
           .step = round,
           .tokens = d.tokens[static_cast<std::size_t>(round - 1)][static_cast<std::size_t>(at.group)]});
      const std::lock_guard lock(checks);
      EXPECT_EQ(outcome.left_out, round == 2 && d.bad_group >= 0 ? std::vector<int>{d.bad_group} : std::vector<int>{});
      const Reference& after = expected[static_cast<std::size_t>(round - 1)];
      for_each_element(engine, [&](std::int64_t index, float& value) {
        ASSERT_NEAR(value, after.of_group(static_cast<std::size_t>(index), at.group, round), 1e-6)
            << "round " << round << ", rank " << rank << ", element " << index;
      });
    }
    const auto& states = registry.all();
    EXPECT_EQ(std::count_if(states.begin(), states.end(), [](const auto& s) { return s.role == shard::Role::anchor; }),
              plan::needs_anchor(d.options.outer) ? 1 : 0);
    for (const shard::State& state : states) {
      if (state.role != shard::Role::anchor && state.role != shard::Role::outer_moments) continue;
      for (const auto& piece : state.arena->map().pieces()) EXPECT_FALSE(engine.map().group_local(piece.unit));
    }
  });
  for (const std::string& error : aftermath.errors) EXPECT_EQ(error, "");
  ASSERT_EQ(aftermath.rounds.size(), static_cast<std::size_t>(kRounds));  // digests agreed in each
}

TEST(RandomRounds, EqualTheModelsAveragedWhole) {
  for (unsigned seed = 1; seed <= 100; ++seed) {
    expect_follows_reference(seed);
    if (testing::Test::HasFailure()) break;
  }
}

TEST(RandomRounds, WhereNoGroupIsSoundTheRunEnds) {
  const auto layout = topology::Layout::make(3, {.groups = std::vector<int>{1, 2}});
  const nn::Model model = tiny_model({});
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        const topology::Coordinates at = layout.at(rank);
        shard::StateRegistry registry;
        shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {}, registry);
        Federation federation(layout, rank, {}, engine, axes, client, registry);
        set_parameters(engine, [](std::int64_t index) { return index == 5 ? std::nanf("") : 1.0f; });
        federation.run_round({.round = 1, .step = 1, .tokens = 1});
      });
  for (const std::string& error : aftermath.errors) {
    EXPECT_NE(error.find("round 1: no group is left to be averaged: group 0: it brings numbers that are not finite; "
                         "group 1: it brings"),
              std::string::npos)
        << error;
  }
  EXPECT_EQ(aftermath.status.first_error->status, 1);
}

}  // namespace
}  // namespace fedshard::federation
