#include "fedshard/federation/synchronous.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "fedshard/plan/freeze.h"
#include "fedshard/shard/digest.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::federation {
namespace {

using testing_support::on_ranks;
using testing_support::tiny_batch;
using testing_support::TinyReference;

constexpr double kMaxNorm = 0.05;

std::vector<topology::Layout> layouts() {
  using List = std::vector<int>;
  return {
      topology::Layout::make(1, {}),
      topology::Layout::make(2, {.groups = 2}),
      topology::Layout::make(4, {.groups = 2}),
      topology::Layout::make(8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2}),
      topology::Layout::make(5, {.groups = 5}),
      topology::Layout::make(4, {.groups = List{1, 3}}),
      topology::Layout::make(7, {.groups = List{4, 3}, .shard_degree = List{2, 3}, .replicate_degree = -1}),
      topology::Layout::make(8, {.groups = List{4, 2, 2}, .shard_degree = 2, .replicate_degree = -1}),
      topology::Layout::make(14, {.groups = List{13, 1}}),
  };
}

// One step of all groups; a rank brings one sequence, some of whose labels are masked in the first group.
void expect_one_step_of_all(const topology::Layout& layout, const std::vector<std::string>& frozen,
                            const topology::ExchangeRules& rules = {}) {
  SCOPED_TRACE(testing::Message() << layout.describe() << ", " << topology::name_of(rules.scheme));
  const nn::Model whole = testing_support::tiny_model({});
  nn::Model model = whole;
  model.plan = plan::freeze(whole.plan, frozen);
  nn::MicroBatch batch = tiny_batch(0, layout.world(), 6, 11);
  batch.labels.narrow(0, 0, 1).narrow(1, 1, 4).fill_(-100);
  TinyReference reference(whole, testing_support::names_of_frozen(model.plan));
  reference.backward(batch);
  const at::Tensor gradient = reference.flat(true);
  const double norm = gradient.to(at::kDouble).norm().item<double>();
  EXPECT_GT(norm, kMaxNorm);
  const at::Tensor expected = gradient * (kMaxNorm / (norm + 1e-6));
  std::mutex mutex;
  std::set<double> norms;
  std::set<std::uint64_t> digests;
  const comm::Traffic traffic = on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const topology::Coordinates at = layout.at(rank);
    shard::StateRegistry registry;
    shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {{}, {}, kMaxNorm}, registry);
    engine.fill(testing_support::tiny_filler(engine.plan()));
    Exchange exchange(layout, rank, engine.plan(), engine.map(), axes, rules);
    const nn::MicroBatch mine{batch.tokens.narrow(0, rank, 1), batch.labels.narrow(0, rank, 1)};
    const shard::StepResult result =
        engine.step({&mine, 1}, [](int) {}, {.sum_over_groups = [&](const auto& sums, const auto& of_group) {
                      return sum_over_groups(exchange, axes, sums, of_group);
                    }});
    const std::uint64_t digest = shard::agreed_digest(engine.plan(), engine.gradients(), axes);
    const std::lock_guard lock(mutex);
    norms.insert(result.grad_norm);
    digests.insert(digest);
    EXPECT_NEAR(result.grad_norm, norm, 5e-5 * norm);
    for (int u = 0; u < engine.map().units(); ++u) {
      const topology::Range held = engine.map().range(u);
      if (held.size() == 0 || model.plan.units[static_cast<std::size_t>(u)].frozen) continue;
      const at::Tensor right = testing_support::held_of(engine.plan(), u, held, expected);
      EXPECT_TRUE(at::allclose(engine.gradients().real(u), right, 2e-5, 1e-7)) << "unit " << u;
    }
  });
  EXPECT_EQ(norms.size(), 1U);  // to the bit
  EXPECT_EQ(digests.size(), 1U);
  const bool naive = rules.scheme == topology::Scheme::naive;
  const std::int64_t bytes = model.plan.exchanged_numel() * 4, copies = naive ? layout.group(0).replicas : 1;
  std::int64_t inside = 0, between = 2 * (layout.groups() - 1) * bytes * copies;
  for (const topology::GroupShape& shape : layout.shapes()) inside += naive ? 0 : (shape.replicas - 1) * bytes;
  EXPECT_EQ(traffic.of(comm::Purpose::aggregate), between + inside);
}

TEST(Synchronous, GradientsAndNormAreThoseOfAllGroupsWithTheSameBits) {
  for (const topology::Layout& layout : layouts()) {
    expect_one_step_of_all(layout, {});
    expect_one_step_of_all(layout, {"table", "block1.*"});
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

TEST(Synchronous, EverySchemeCountsEachElementOnce) {
  using topology::Scheme;
  const topology::Buckets buckets{topology::Buckets::By::size, 20};
  const auto layout = topology::Layout::make(12, {.groups = 2, .shard_degree = 3, .replicate_degree = 2});
  expect_one_step_of_all(layout, {}, {Scheme::leader, buckets});
  expect_one_step_of_all(layout, {"table"}, {Scheme::naive, buckets});
  const auto unequal = topology::Layout::make(
      8, {.groups = std::vector<int>{6, 2}, .shard_degree = std::vector<int>{3, 1}, .replicate_degree = 2});
  expect_one_step_of_all(unequal, {}, {Scheme::naive});
  expect_one_step_of_all(unequal, {}, {Scheme::leader});
}

}  // namespace
}  // namespace fedshard::federation
