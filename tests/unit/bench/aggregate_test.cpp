#include "fedshard/bench/aggregate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <mutex>
#include <numeric>
#include <set>

#include "fedshard/base/error.h"
#include "tests/support/rank_threads.h"

namespace fedshard::bench {
namespace {

using topology::Buckets;
using topology::Scheme;

plan::ModelPlan plan_of(const std::vector<std::int64_t>& unit_numel) {
  plan::ModelPlan plan;
  for (std::size_t u = 0; u < unit_numel.size(); ++u) {
    const std::string name = "unit " + std::to_string(u);
    plan.units.push_back({name, {{name, {unit_numel[u]}, {}}}});
    plan.stages.push_back({name, {static_cast<int>(u)}});
  }
  return plan;
}

AggregateOptions options() {
  return {plan_of({13, 1, 40}),
          {Scheme::split, Scheme::leader, Scheme::naive},
          {Buckets{}, Buckets{Buckets::By::unit}, Buckets{Buckets::By::size, 5}},
          {1, 3},
          {at::kFloat, at::kBFloat16},
          2};
}

TEST(Aggregate, AWholeExchangeHasOneConcurrency) {
  const std::vector<AggregateCase> cases = cases_of(options());
  EXPECT_EQ(cases.size(), 2U * 3 * (1 + 2 + 2));
  for (const AggregateCase& c : cases) {
    if (c.rules.buckets.by == Buckets::By::whole) {
      EXPECT_EQ(c.rules.concurrency, 1);
    }
  }
}

// The mean is exact, so that it has one right value; groups differ, so that none of them passes for it.
TEST(Aggregate, TheGroupsMeanIsExactInFp32) {
  for (const int groups : {1, 2, 3, 7, 16, 1000}) {
    const std::vector<double> weights = weights_of(groups);
    EXPECT_EQ(std::accumulate(weights.begin(), weights.end(), 0.0), 1.0);
    int differ = 0;
    for (std::int64_t i = 0; i < 100; ++i) {
      double sum = 0;
      for (int g = 0; g < groups; ++g) {
        const float value = value_of(i, g);
        EXPECT_EQ(value, static_cast<float>(c10::BFloat16(value)));
        EXPECT_GT(weights[static_cast<std::size_t>(g)], 0);
        sum += weights[static_cast<std::size_t>(g)] * value;
      }
      EXPECT_EQ(sum, static_cast<float>(sum));
      differ += sum != value_of(i, 0);
    }
    EXPECT_GT(differ, groups == 1 ? -1 : 90) << groups;
  }
}

// [by group] of one rank each, which hold the whole model.
TEST(Aggregate, AWrongElementIsNamed) {
  const plan::ModelPlan plan = plan_of({3, 5});
  const shard::ArenaMap map(plan, 1, 0);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const shard::Arena mean(map, dtype);
    const std::vector<double> weights = weights_of(2);
    for (int u = 0; u < 2; ++u) {
      for (std::int64_t i = 0; i < map.range(u).size(); ++i) {
        const std::int64_t index = plan.global_offset(u) + i;
        mean.real(u)[i] = weights[0] * value_of(index, 0) + weights[1] * value_of(index, 1);
      }
    }
    check_mean(plan, 2, mean);
    EXPECT_THROW(check_mean(plan, 3, mean), base::RunError);
    for (const float wrong : {7.5f, std::nanf("")}) {
      const float right = mean.real(1)[4].item<float>();
      mean.real(1)[4] = wrong;
      try {
        check_mean(plan, 2, mean);
        FAIL();
      } catch (const base::RunError& e) {
        EXPECT_EQ(e.what(),
                  fmt::format("the exchange is wrong: element 4 of unit 'unit 1' is {} and not {}", wrong, right));
      }
      mean.real(1)[4] = right;
    }
  }
}

TEST(Aggregate, EveryCaseOnALayoutIsRightAndSendsWhatTheFormulaSays) {
  const AggregateOptions all = options();
  const std::int64_t numel = all.plan.numel();
  const auto layout = topology::Layout::make(8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2});
  std::mutex mutex;
  std::vector<AggregateRow> rows;
  comm::LoopbackWorld loopback;
  std::vector<std::unique_ptr<comm::TrafficCounter>> traffic;
  for (int rank = 0; rank < 8; ++rank) {
    traffic.push_back(std::make_unique<comm::TrafficCounter>(comm::groups_by_rank(layout)));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 8; ++rank) {
    threads.emplace_back([&, rank] {
      at::set_num_threads(1);
      comm::TrafficCounter& mine = *traffic[static_cast<std::size_t>(rank)];
      const auto backend = loopback.backend(rank);
      comm::Axes axes = comm::make_axes(layout, rank, *backend, mine);
      std::vector<int> ranks(8);
      std::iota(ranks.begin(), ranks.end(), 0);
      const auto world = comm::connect_over_messages(*backend, mine, nullptr)({"world", ranks, rank});
      measure_aggregates(all, layout, axes, *world, mine, [&](const AggregateRow& row) {
        const std::lock_guard lock(mutex);
        if (rank == 0) rows.push_back(row);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(rows.size(), cases_of(all).size());
  std::int64_t sent = 0;
  for (const auto& of_rank : traffic) sent += of_rank->read().of(comm::Purpose::aggregate);
  std::int64_t expected = 0;
  for (const AggregateRow& row : rows) {
    const auto element = static_cast<std::int64_t>(c10::elementSize(row.what.dtype));
    const bool naive = row.what.rules.scheme == Scheme::naive;
    // Between two groups, and with split and leader to the one other replica of each.
    const std::int64_t all_ranks = numel * element * (2 * (naive ? 2 : 1) + (naive ? 0 : 2));
    expected += (1 + all.repeat) * all_ranks;
    EXPECT_GE(row.bytes, all_ranks / 8);
    EXPECT_LE(row.bytes, all_ranks);
    EXPECT_GT(row.seconds, 0);
    EXPECT_DOUBLE_EQ(row.gb_per_s * row.seconds * 1e9, static_cast<double>(numel * element));
  }
  EXPECT_EQ(sent, expected);
}

TEST(Aggregate, RowsAsTextAndCsv) {
  const AggregateRow row{
      {{Scheme::leader, {Buckets::By::size, 1 << 18}, 3}, at::kBFloat16}, 0.25, 3 << 20, 1.5, 1 << 21};
  EXPECT_EQ(csv_header() + csv_line(row),
            "dtype,scheme,bucket,concurrency,seconds,bytes,gb_per_s,peak_bytes\n"
            "bf16,leader,1MiB,3,0.250000000,3145728,1.500000,2097152\n");
  EXPECT_EQ(table_header().size(), table_line(row).size());
  EXPECT_NE(table_line(row).find("3.00 MiB"), std::string::npos);
}

}  // namespace
}  // namespace fedshard::bench
