#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "fedshard/federation/exchange.h"
#include "fedshard/federation/synchronous.h"
#include "fedshard/plan/memory.h"
#include "tests/support/memory_meter.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::federation {
namespace {

enum class What { a_round, an_outer_step, a_sum_of_gradients };

void exchange_once(What what, Exchange& exchange, comm::Axes& axes, const shard::Arena& arena) {
  if (what == What::a_sum_of_gradients) {
    sum_over_groups(exchange, axes, arena, {});
    return;
  }
  const std::size_t groups = axes.group_members.size();
  const std::vector<double> weights(groups, 1.0 / static_cast<double>(groups));
  if (what == What::an_outer_step) {
    const at::Tensor mean = exchange.mean_of(arena, weights, comm::Purpose::aggregate);
    const at::Tensor next = exchange.room(mean.scalar_type());
    exchange.own(next).copy_(mean);
    exchange.gather(next, comm::Purpose::aggregate);
    exchange.write(next, arena);
  } else {
    exchange.write(exchange.gathered_mean_of(arena, weights, comm::Purpose::aggregate), arena);
  }
}

// An exchange on every rank; the bytes of the rank that needs most are the predicted ones.
void expect_predicted(const topology::Layout& layout, What what, const topology::ExchangeRules& rules) {
  const plan::ModelPlan plan = testing_support::tiny_model({}).plan;
  std::mutex mutex;
  std::vector<std::int64_t> most(static_cast<std::size_t>(layout.groups()), 0);  // by group
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const topology::Coordinates at = layout.at(rank);
    const shard::ArenaMap map(plan, layout.group(at.group).shards, at.shard);
    const shard::Arena arena(map);
    Exchange exchange(layout, rank, plan, map, axes, rules);
    const testing_support::MemoryMeter meter;
    exchange_once(what, exchange, axes, arena);
    const std::lock_guard lock(mutex);
    EXPECT_EQ(meter.live(), 0);
    for (std::size_t group = 0; group < most.size(); ++group) {
      const bool counts = layout.equal_groups() || static_cast<int>(group) == at.group;
      if (counts) most[group] = std::max(most[group], meter.peak());
    }
  });
  for (int group = 0; group < layout.groups(); ++group) {
    EXPECT_EQ(most[static_cast<std::size_t>(group)],
              4 * plan::exchange_numel(plan, layout, group, {what == What::an_outer_step, false, rules}))
        << layout.describe() << ", group " << group << ", " << topology::name_of(rules.scheme) << ", buckets "
        << topology::text_of(rules.buckets) << ", " << rules.concurrency << " at once";
    if (layout.equal_groups()) break;  // the figure is that of the last group's ranks, which have most
  }
}

void expect_predicted(const topology::Layout& layout) {
  expect_predicted(layout, What::a_round, {});
  if (layout.groups() == 1) return;  // there is nothing to sum, and nothing to send in pieces
  expect_predicted(layout, What::a_sum_of_gradients, {});
  using topology::Buckets;
  using topology::Scheme;
  for (const Buckets& buckets : {Buckets{}, Buckets{Buckets::By::unit}, Buckets{Buckets::By::size, 30}}) {
    for (const int concurrency : {1, 3}) expect_predicted(layout, What::a_round, {Scheme::split, buckets, concurrency});
    expect_predicted(layout, What::a_round, {Scheme::leader, buckets, 2});
    expect_predicted(layout, What::an_outer_step, {Scheme::leader, buckets, 2});
    if (layout.equal_groups()) expect_predicted(layout, What::a_round, {Scheme::naive, buckets, 2});
  }
}

TEST(ExchangeMemory, IsPredictedForEveryLayout) {
  const auto equal = [](int groups, int replicas, int shards) {
    return topology::Layout::make(groups * replicas * shards,
                                  {.groups = groups, .shard_degree = shards, .replicate_degree = replicas});
  };
  for (const int groups : {1, 2, 3, 5}) {
    for (const int replicas : {1, 2, 3}) {
      for (const int shards : {1, 2}) expect_predicted(equal(groups, replicas, shards));
    }
  }
  expect_predicted(equal(2, 1, 13));
}

TEST(ExchangeMemory, IsPredictedForUnequalGroups) {
  using List = std::vector<int>;
  expect_predicted(topology::Layout::make(4, {.groups = List{1, 3}}));
  expect_predicted(topology::Layout::make(10, {.groups = List{4, 3, 3}}));
  expect_predicted(topology::Layout::make(8, {.groups = List{4, 2, 2}, .shard_degree = 2, .replicate_degree = -1}));
  expect_predicted(
      topology::Layout::make(9, {.groups = List{6, 3}, .shard_degree = List{3, 1}, .replicate_degree = -1}));
}

}  // namespace
}  // namespace fedshard::federation
