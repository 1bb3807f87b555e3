#include "fedshard/cost/collective.h"

#include <gtest/gtest.h>

#include <deque>

#include "fedshard/base/error.h"

namespace fedshard::cost {
namespace {

// Figures that were derived by hand and by counting messages.
TEST(Collective, FiguresOfTheTextbook) {
  EXPECT_EQ(ring_all_gather(4, 1000), (CollectiveCost{3000, 3, 3, 12000, 12}));
  EXPECT_EQ(ring_reduce_scatter(8, 4096), (CollectiveCost{28672, 7, 7, 229376, 56}));
  EXPECT_EQ(ring_all_reduce(6, 3000), (CollectiveCost{5000, 10, 10, 30000, 60}));
  EXPECT_EQ(recursive_all_gather(16, 64), (CollectiveCost{960, 4, 4, 15360, 64}));
  EXPECT_EQ(recursive_all_reduce(4, 400), (CollectiveCost{600, 4, 4, 2400, 16}));
  EXPECT_EQ(tree_broadcast(7, 1000), (CollectiveCost{3000, 3, 3, 6000, 6}));
  EXPECT_EQ(chain_broadcast(5, 1200, 4), (CollectiveCost{1200, 4, 7, 4800, 16}));
  const CollectiveCost check = consistency_check(64);
  EXPECT_EQ(check.total_messages, 8190);
  EXPECT_EQ(check.rounds, 252);
}

TEST(Collective, OneRankSendsNothing) {
  for (const CollectiveCost& cost :
       {ring_all_gather(1, 7), ring_all_reduce(1, 7), recursive_all_gather(1, 7), recursive_all_reduce(1, 7),
        tree_broadcast(1, 7), chain_broadcast(1, 7, 3), consistency_check(1)}) {
    EXPECT_EQ(cost, CollectiveCost{});
  }
}

// Who has the message tells another in each round, until all have it.
TEST(Collective, TreeAgainstItsRounds) {
  for (std::int64_t n = 1; n <= 70; ++n) {
    std::int64_t have = 1, rounds = 0, messages = 0;
    for (; have < n; ++rounds) {
      const std::int64_t told = std::min(have, n - have);
      messages += told;
      have += told;
    }
    const CollectiveCost cost = tree_broadcast(n, 10);
    EXPECT_EQ(cost.rounds, rounds) << n;
    EXPECT_EQ(cost.total_messages, messages) << n;
    EXPECT_EQ(cost.total, 10 * messages) << n;
  }
}

// Pieces go down a chain, one a round over each link.
TEST(Collective, ChainAgainstItsRounds) {
  for (std::int64_t n = 2; n <= 9; ++n) {
    for (std::int64_t chunks = 1; chunks <= 6; ++chunks) {
      std::deque<std::int64_t> has(static_cast<std::size_t>(n), 0);
      has[0] = chunks;
      std::int64_t rounds = 0, messages = 0;
      for (; has.back() < chunks; ++rounds) {
        const std::deque<std::int64_t> before = has;
        for (std::size_t i = 1; i < has.size(); ++i) {
          if (before[i - 1] > before[i]) ++has[i], ++messages;
        }
      }
      const CollectiveCost cost = chain_broadcast(n, 60, chunks);
      EXPECT_EQ(cost.rounds, rounds) << n << " " << chunks;
      EXPECT_EQ(cost.total_messages, messages) << n << " " << chunks;
    }
  }
}

TEST(Collective, RefusesWhatThereIsNot) {
  EXPECT_THROW(ring_all_gather(0, 1), base::Error);
  EXPECT_THROW(recursive_all_gather(6, 1), base::UsageError);
  EXPECT_THROW(recursive_all_reduce(12, 1), base::UsageError);
  EXPECT_THROW(chain_broadcast(2, 1, 0), base::UsageError);
}

}  // namespace
}  // namespace fedshard::cost
