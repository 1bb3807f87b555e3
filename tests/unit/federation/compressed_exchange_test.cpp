#include "fedshard/federation/compressed_exchange.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "fedshard/federation/round.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using plan::Compression;
using testing_support::tiny_model;
using testing_support::tiny_value;
using Kind = Compression::Kind;
using List = std::vector<int>;

// With blocks so small that parts have several.
std::vector<Compression> compressions() {
  return {{Kind::none}, {Kind::bf16}, {Kind::int8, 8}, {Kind::int4, 16}, {Kind::topk, 16, 4}};
}

std::vector<topology::Layout> layouts() {
  return {topology::Layout::make(2, {.groups = 2}),
          topology::Layout::make(12, {.groups = 3, .shard_degree = 2, .replicate_degree = 2}),
          topology::Layout::make(4, {.groups = List{1, 3}}),
          topology::Layout::make(9, {.groups = List{4, 3, 2}, .shard_degree = List{2, 3, 1}, .replicate_degree = -1})};
}

std::vector<double> weights_for(const topology::Layout& layout) {
  return layout.groups() == 2 ? std::vector<double>{0.25, 0.75} : std::vector<double>{0.5, 0.125, 0.375};
}

// What group g has changed of an element in a round, of several magnitudes.
float change(std::int64_t index, int group, int round) {
  const double phase = 0.9 * static_cast<double>(index) + 2.1 * group + 0.7 * round;
  return static_cast<float>(std::sin(phase) * std::pow(10.0, static_cast<double>(index % 5) - 4));
}

// One rank's part in an exchange.
struct Member {
  Member(const topology::Layout& layout, int rank, const plan::ModelPlan& of, const Compression& compression,
         comm::Axes& axes, const topology::ExchangeRules& rules = {})
      : plan(of),
        at(layout.at(rank)),
        map(of, layout.group(at.group).shards, at.shard),
        exchange(layout, rank, of, map, axes, rules),
        slice(exchange.slice_map(map)),
        compressed(compression, exchange, slice, axes, registry) {}

  // The packed slice of a function of the global index.
  at::Tensor packed(const std::function<float(std::int64_t)>& value) const {
    const at::Tensor values = at::empty({exchange.slice_numel()}, at::kFloat);
    for (const Exchange::Part& part : exchange.parts()) {
      float* out = values.mutable_data_ptr<float>() + part.offset;
      const std::int64_t first = plan.global_offset(part.unit) + part.range.begin;
      for (std::int64_t i = 0; i < part.range.size(); ++i) out[i] = value(first + i);
    }
    return values;
  }
  // Adds factor * values, a packed slice or the packed parts that this group owns, to sums by global index; of what
  // several replicas bring, once.
  void add(std::vector<double>& sums, const at::Tensor& values, double factor, bool owned_alone = false) const {
    if (!exchange.is_counted()) return;
    std::int64_t offset = 0;
    for (const Exchange::Part& part : exchange.parts()) {
      if (owned_alone && part.owner != at.group) continue;
      const float* in = values.const_data_ptr<float>() + offset;
      const std::int64_t first = plan.global_offset(part.unit) + part.range.begin;
      for (std::int64_t i = 0; i < part.range.size(); ++i) sums[static_cast<std::size_t>(first + i)] += factor * in[i];
      offset += part.range.size();
    }
  }
  const at::Tensor& state(const std::string& name) const {
    for (const shard::State& s : registry.all()) {
      if (s.name == name) return s.arena->flat();
    }
    throw std::runtime_error("no state " + name);
  }

  const plan::ModelPlan& plan;
  topology::Coordinates at;
  shard::ArenaMap map;
  Exchange exchange;
  shard::ArenaMap slice;
  shard::StateRegistry registry;
  CompressedExchange compressed;
};

// Over the rounds, what was applied, and what both directions' residuals hold back, is what the groups have changed.
void expect_nothing_is_lost(const topology::Layout& layout, const Compression& compression,
                            const topology::ExchangeRules& rules = {}) {
  constexpr int kRounds = 50;
  const plan::ModelPlan plan = tiny_model({}).plan;
  const std::vector<double> weights = weights_for(layout);
  std::vector<double> changed(static_cast<std::size_t>(plan.numel()), 0), accounted = changed;
  std::mutex mutex;
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    Member member(layout, rank, plan, compression, axes, rules);
    const double weight = weights[static_cast<std::size_t>(member.at.group)];
    for (int round = 0; round < kRounds; ++round) {
      const at::Tensor mine = member.packed([&](std::int64_t i) { return change(i, member.at.group, round); });
      const at::Tensor mean = member.compressed.mean_of(mine, weights, comm::Purpose::aggregate);
      EXPECT_TRUE(same_bits(mean, member.compressed.mean_of(mine, weights, comm::Purpose::aggregate)))
          << "something changed before the commit";
      member.compressed.commit();
      const std::lock_guard lock(mutex);
      member.add(changed, mine, weight);
      if (member.at.group == 0) member.add(accounted, mean, 1);
    }
    const std::lock_guard lock(mutex);
    member.add(accounted, member.state("residual_sent"), weight);
    member.add(accounted, member.state("residual_returned"), 1, /*owned_alone=*/true);
  });
  for (std::size_t i = 0; i < changed.size(); ++i) ASSERT_NEAR(accounted[i], changed[i], 1e-5) << "element " << i;
}

TEST(CompressedExchange, LosesNothingOverFiftyRounds) {
  for (const topology::Layout& layout : layouts()) {
    for (const Compression& compression : compressions()) {
      SCOPED_TRACE(testing::Message() << layout.describe() << ", kind " << static_cast<int>(compression.kind));
      expect_nothing_is_lost(layout, compression);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

using topology::Buckets;
using topology::ExchangeRules;
using topology::Scheme;

const std::vector<ExchangeRules> kRules{{Scheme::leader, {Buckets::By::unit}, 1},
                                        {Scheme::split, {Buckets::By::size, 33}, 3},
                                        {Scheme::naive, {Buckets::By::size, 20}, 2}};

TEST(CompressedExchange, LosesNothingInAnyScheme) {
  const topology::Layout layout = layouts()[1];
  for (const ExchangeRules& rules : kRules) {
    for (const Compression& compression : compressions()) {
      SCOPED_TRACE(testing::Message() << topology::name_of(rules.scheme) << ", kind "
                                      << static_cast<int>(compression.kind));
      expect_nothing_is_lost(layout, compression, rules);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

void expect_the_encoded_bytes(const topology::Layout& layout, const Compression& compression,
                              const ExchangeRules& rules = {}) {
  SCOPED_TRACE(testing::Message() << layout.describe() << ", kind " << static_cast<int>(compression.kind) << ", "
                                  << topology::name_of(rules.scheme));
  const plan::ModelPlan plan = tiny_model({}).plan;
  std::vector<std::int64_t> unit_numel;
  for (const plan::UnitSpec& unit : plan.units) unit_numel.push_back(unit.numel());
  std::vector<std::vector<double>> means(static_cast<std::size_t>(layout.groups()),
                                         std::vector<double>(static_cast<std::size_t>(plan.numel()), 0));
  std::mutex mutex;
  const comm::Traffic traffic = testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    Member member(layout, rank, plan, compression, axes, rules);
    const at::Tensor mean =
        member.compressed.mean_of(member.packed([&](std::int64_t i) { return change(i, member.at.group, 0); }),
                                  weights_for(layout), comm::Purpose::aggregate);
    const std::lock_guard lock(mutex);
    member.add(means[static_cast<std::size_t>(member.at.group)], mean, 1);
  });
  std::int64_t encoded = 0;
  for (int rank = 0; rank < layout.world(); ++rank) {
    for (const auto& part : topology::exchange_parts(layout, unit_numel, rank, rules)) {
      if (layout.group_of(rank) == 0) encoded += plan::encoded_bytes(compression, part.range.size());
    }
  }
  EXPECT_EQ(traffic.inter_group, 2 * (layout.groups() - 1) * encoded);
  EXPECT_EQ(traffic.of(comm::Purpose::aggregate), traffic.inter_group);
  for (const auto& of_group : means) EXPECT_EQ(of_group, means[0]);
}

TEST(CompressedExchange, SendsTheEncodedBytesAndAllGroupsDecodeTheSame) {
  for (const Compression& compression : compressions()) {
    for (const topology::Layout& layout : layouts()) expect_the_encoded_bytes(layout, compression);
    for (const ExchangeRules& rules : kRules) expect_the_encoded_bytes(layouts()[1], compression, rules);
  }
}

// What a group of no weight sends, finite or not, is not in the mean, and its residual stays for when it counts.
TEST(CompressedExchange, AGroupOfNoWeightHasNoPartInIt) {
  const plan::ModelPlan plan = tiny_model({}).plan;
  const auto layout = topology::Layout::make(4, {.groups = List{1, 3}});
  const Compression compression{Kind::int8, 8};
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    Member member(layout, rank, plan, compression, axes);
    const auto exchange = [&](bool second_is_sound, const std::vector<double>& weights) {
      const bool spoilt = !second_is_sound && member.at.group == 1;
      return member.compressed.mean_of(
          member.packed([&](std::int64_t i) { return spoilt ? std::nanf("") : change(i, member.at.group, 0); }),
          weights, comm::Purpose::aggregate);
    };
    exchange(true, std::vector<double>{0.5, 0.5});
    member.compressed.commit();
    const at::Tensor before = member.state("residual_sent").clone();
    EXPECT_GT(before.abs().max().item<double>(), 0);
    const at::Tensor alone = exchange(true, std::vector<double>{1, 0});
    EXPECT_TRUE(same_bits(alone, exchange(false, std::vector<double>{1, 0})));
    member.compressed.commit();
    EXPECT_EQ(same_bits(member.state("residual_sent"), before), member.at.group == 1);
  });
}

// Rounds in which nobody has trained change no bit, compressed or not, also of a -0.
TEST(CompressedRounds, WithoutTrainingChangeNoBit) {
  const nn::Model model = tiny_model({.tied = true});
  const auto value = [](std::int64_t index) { return index % 5 == 0 ? -0.0f : tiny_value(index) / 3; };
  for (const topology::Layout& layout : layouts()) {
    for (const Compression& compression : compressions()) {
      const Aftermath aftermath =
          on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
            const topology::Coordinates at = layout.at(rank);
            shard::StateRegistry registry;
            shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {}, registry);
            FederationOptions options;
            options.compression = compression;
            Federation federation(layout, rank, options, engine, axes, client, registry);
            set_parameters(engine, value);
            federation.set_anchor();
            for (int round = 1; round <= 2; ++round) federation.run_round({.round = round, .step = 1, .tokens = 3});
            EXPECT_TRUE(same_bits(engine.parameters().flat(), arena_of(model.plan, engine.map(), value)));
          });
      EXPECT_EQ(aftermath.status.rounds, 2);
    }
  }
}

}  // namespace
}  // namespace fedshard::federation
