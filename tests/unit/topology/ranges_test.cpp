#include "fedshard/topology/ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace fedshard::topology {
namespace {

TEST(Ranges, ShardsAndSlicesCoverAUnitOnce) {
  for (std::int64_t numel = 1; numel <= 40; ++numel) {
    for (int shards = 1; shards <= 7; ++shards) {
      for (int replicas = 1; replicas <= 4; ++replicas) {
        const GroupShape shape{0, shards * replicas, shards, replicas};
        std::int64_t next = 0;
        for (int f = 0; f < shards; ++f) {
          for (int r = 0; r < replicas; ++r) {
            const Range slice = slice_range(numel, shape, r, f);
            ASSERT_EQ(slice.begin, next);
            next = slice.end;
          }
          ASSERT_EQ(next, shard_range(numel, shards, f).end);
        }
        ASSERT_EQ(next, numel);
      }
    }
  }
}

// Every element lies in exactly one part, of exactly one holder in each group; and all holders agree on the part.
void expect_consistent(const Layout& layout, const std::vector<std::int64_t>& units) {
  std::map<std::tuple<int, std::int64_t, int>, int> seen;  // (unit, element, group) -> times
  std::map<std::pair<int, std::int64_t>, ExchangePart> by_begin;
  for (int rank = 0; rank < layout.world(); ++rank) {
    const int group = layout.group_of(rank);
    const std::vector<int> peers = layout.federation_peers(rank);
    for (const ExchangePart& part : exchange_parts(layout, units, rank)) {
      ASSERT_EQ(part.holders[group], rank);
      for (const int holder : part.holders) ASSERT_TRUE(std::binary_search(peers.begin(), peers.end(), holder));
      for (std::int64_t e = part.range.begin; e < part.range.end; ++e) ++seen[{part.unit, e, group}];
      const auto [place, fresh] = by_begin.try_emplace({part.unit, part.range.begin}, part);
      if (!fresh) {
        ASSERT_EQ(place->second.range, part.range);
        ASSERT_EQ(place->second.owner, part.owner);
        ASSERT_EQ(place->second.holders, part.holders);
      }
    }
  }
  std::int64_t expected = 0;
  for (const std::int64_t numel : units) expected += numel * layout.groups();
  ASSERT_EQ(static_cast<std::int64_t>(seen.size()), expected);
  for (const auto& [key, times] : seen) ASSERT_EQ(times, 1);
}

TEST(Ranges, ExchangePartsFitTogetherInRandomLayouts) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int> sizes, shards, replicas;
    int world = 0;
    const int groups = 1 + static_cast<int>(random() % 4);
    for (int g = 0; g < groups; ++g) {
      shards.push_back(1 + static_cast<int>(random() % 4));
      replicas.push_back(1 + static_cast<int>(random() % 3));
      sizes.push_back(shards.back() * replicas.back());
      world += sizes.back();
    }
    const Layout layout = Layout::make(world, {.groups = sizes, .shard_degree = shards, .replicate_degree = replicas});
    expect_consistent(layout, {1, 2, 13, static_cast<std::int64_t>(1 + random() % 60)});
  }
}

// cost.md's case asym_4_6: groups of 4 and 6 ranks, N = 1200: cuts {i/4} and {i/6}, 8 elementary ranges.
TEST(Ranges, UnequalGroupsMeetInTheIntersections) {
  const Layout layout = Layout::make(10, {.groups = std::vector<int>{4, 6}});
  std::set<std::int64_t> cuts;
  std::map<int, std::int64_t> sent;
  for (int rank = 0; rank < 10; ++rank) {
    for (const ExchangePart& part : exchange_parts(layout, std::vector<std::int64_t>{1200}, rank)) {
      if (part.owner == 0) cuts.insert(part.range.begin);
      // To the owner, or, as the owner, back to the other group: the same bytes.
      sent[rank] += 2 * part.range.size();
    }
  }
  EXPECT_EQ(cuts, (std::set<std::int64_t>{0, 200, 300, 400, 600, 800, 900, 1000}));
  std::int64_t total = 0, most = 0;
  for (const auto& [rank, bytes] : sent) total += bytes, most = std::max(most, bytes);
  EXPECT_EQ(total, 4800);
  EXPECT_EQ(most, 600);
}

TEST(Ranges, EqualGroupsMeetTheirTwins) {
  const Layout layout = Layout::make(8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2});
  for (int rank = 0; rank < 8; ++rank) {
    for (const ExchangePart& part : exchange_parts(layout, std::vector<std::int64_t>{101, 7}, rank)) {
      EXPECT_EQ(part.holders, layout.federation_peers(rank));
    }
  }
}

}  // namespace
}  // namespace fedshard::topology
