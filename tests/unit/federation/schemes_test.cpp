// Whole rounds in every scheme, in buckets and at once: parameters, digests and what the records say of them.
#include <gtest/gtest.h>

#include <cmath>

#include "fedshard/federation/round.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using testing_support::tiny_model;
using testing_support::tiny_value;
using topology::Buckets;
using topology::Scheme;

struct Result {
  std::vector<nlohmann::json> rounds;
  comm::Traffic traffic;
};

Result run(const topology::Layout& layout, const topology::ExchangeRules& rules, double max_norm,
           int bad_replica = -1) {
  const nn::Model model = tiny_model({});
  FederationOptions options;
  options.exchange = rules;
  options.outer = plan::usual_options(plan::Outer::nesterov);
  options.outer.max_norm = max_norm;
  const Aftermath aftermath =
      on_federated_ranks(layout, [&](int rank, comm::Axes& axes, control::CoordinatorClient& client) {
        const topology::Coordinates at = layout.at(rank);
        shard::StateRegistry registry;
        shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {}, registry);
        Federation federation(layout, rank, options, engine, axes, client, registry);
        set_parameters(engine, tiny_value);
        federation.set_anchor();
        for (int round = 1; round <= 2; ++round) {
          const bool spoilt = at.group == 1 && at.replica == bad_replica && round == 1;
          set_parameters(engine, [&](std::int64_t index) {
            if (spoilt && index == 40) return std::nanf("");
            return tiny_value(index + 3 * at.group) * static_cast<float>(round);
          });
          federation.run_round({.round = round, .step = round, .tokens = 1 + at.group});
        }
      });
  for (const std::string& error : aftermath.errors) EXPECT_EQ(error, "");
  EXPECT_EQ(aftermath.rounds.size(), 2U);
  return {aftermath.rounds, aftermath.traffic};
}

// Sums over ranks may end in other bits, so norms are compared as numbers; without clipping nothing depends on them.
void expect_alike(const Result& result, const Result& expected) {
  for (std::size_t round = 0; round < 2; ++round) {
    const nlohmann::json &r = result.rounds.at(round), &e = expected.rounds.at(round);
    EXPECT_EQ(r["digest"], e["digest"]);
    EXPECT_EQ(r["left_out"], e["left_out"]);
    for (const char* name : {"drift", "change_norm", "cosine"}) {
      ASSERT_EQ(r[name].size(), e[name].size());
      for (std::size_t g = 0; g < r[name].size(); ++g) {
        if (e[name][g].is_null()) {
          EXPECT_TRUE(r[name][g].is_null()) << name;
        } else {
          EXPECT_NEAR(r[name][g].get<double>(), e[name][g].get<double>(), 1e-9) << name << ", group " << g;
        }
      }
    }
  }
}

TEST(Schemes, RoundsHaveTheSameBitsAndMeasures) {
  const auto layout = topology::Layout::make(12, {.groups = 2, .shard_degree = 2, .replicate_degree = 3});
  const Result split = run(layout, {}, 0);
  for (const Buckets& buckets : {Buckets{}, Buckets{Buckets::By::unit}, Buckets{Buckets::By::size, 25}}) {
    for (const Scheme scheme : {Scheme::split, Scheme::leader, Scheme::naive}) {
      SCOPED_TRACE(testing::Message() << topology::name_of(scheme) << ", buckets " << topology::text_of(buckets));
      const Result result = run(layout, {scheme, buckets, 2}, 0);
      expect_alike(result, split);
      const std::int64_t inside = scheme == Scheme::naive ? 0 : 2 * 2 * tiny_model({}).plan.numel() * 4;
      const std::int64_t between = 2 * tiny_model({}).plan.numel() * 4 * (scheme == Scheme::naive ? 3 : 1);
      EXPECT_EQ(result.traffic.of(comm::Purpose::aggregate), 2 * (inside + between));
    }
  }
}

TEST(Schemes, UnequalReplicasFollowTheirLeader) {
  const auto layout = topology::Layout::make(
      9, {.groups = std::vector<int>{6, 3}, .shard_degree = std::vector<int>{3, 1}, .replicate_degree = -1});
  expect_alike(run(layout, {Scheme::leader, {Buckets::By::size, 25}, 2}, 0), run(layout, {}, 0));
}

// A pseudo-gradient's norm counts each element once: otherwise clipping would shorten it too much.
TEST(Schemes, ClipByTheNormOfTheWholeModel) {
  const auto layout = topology::Layout::make(8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2});
  const Result split = run(layout, {}, 0.5), naive = run(layout, {Scheme::naive}, 0.5);
  for (std::size_t g = 0; g < 2; ++g) {
    const auto drift = [&](const Result& r) { return r.rounds[1]["drift"][g].get<double>(); };
    EXPECT_NEAR(drift(naive), drift(split), 1e-5);
  }
}

// Whichever replica holds a number that is not finite, its group is left out.
TEST(Schemes, TheGuardSeesEveryReplica) {
  const auto layout = topology::Layout::make(8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2});
  for (const Scheme scheme : {Scheme::split, Scheme::leader, Scheme::naive}) {
    for (const int replica : {0, 1}) {
      const Result result = run(layout, {scheme}, 0, replica);
      EXPECT_EQ(result.rounds[0]["left_out"], (std::vector<int>{1})) << topology::name_of(scheme);
      EXPECT_EQ(result.rounds[1]["left_out"], std::vector<int>{}) << topology::name_of(scheme);
    }
  }
}

}  // namespace
}  // namespace fedshard::federation
