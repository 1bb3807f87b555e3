#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "fedshard/federation/exchange.h"
#include "fedshard/plan/memory.h"
#include "tests/support/memory_meter.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::federation {
namespace {

// A round's exchange on every rank; the bytes of the rank that needs most are the predicted ones.
void expect_predicted(int groups, int replicas, int shards) {
  const plan::ModelPlan plan = testing_support::tiny_model({}).plan;
  const auto layout = topology::Layout::make(groups * replicas * shards,
                                             {.groups = groups, .shard_degree = shards, .replicate_degree = replicas});
  std::mutex mutex;
  std::int64_t most = 0;
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const shard::ArenaMap map(plan, shards, layout.at(rank).shard);
    const shard::Arena arena(map);
    Exchange exchange(layout, rank, plan, map, axes);
    const testing_support::MemoryMeter meter;
    {
      const std::vector<double> weights(static_cast<std::size_t>(groups), 1.0 / groups);
      const at::Tensor mean = exchange.mean_of(arena, weights, comm::Purpose::aggregate);
      exchange.spread(mean, arena, comm::Purpose::aggregate);
    }
    const std::lock_guard lock(mutex);
    EXPECT_EQ(meter.live(), 0);
    most = std::max(most, meter.peak());
  });
  const plan::MemoryTable table =
      plan::predict_memory(plan, {.shards = shards, .replicas = replicas, .groups = groups, .federation = true});
  EXPECT_EQ(most, table.bytes(plan::MemoryPurpose::exchange))
      << groups << " groups of " << replicas << " replicas of " << shards << " shards";
}

TEST(ExchangeMemory, IsPredictedForEveryLayout) {
  for (const int groups : {1, 2, 3, 5}) {
    for (const int replicas : {1, 2, 3}) {
      for (const int shards : {1, 2}) expect_predicted(groups, replicas, shards);
    }
  }
  expect_predicted(2, 1, 13);
}

}  // namespace
}  // namespace fedshard::federation
