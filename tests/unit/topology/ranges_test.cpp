#include "fedshard/topology/ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace fedshard::topology {
namespace {

constexpr Scheme kSchemes[] = {Scheme::split, Scheme::leader, Scheme::naive};

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

TEST(Ranges, OneReplicaLeadsAndNaiveOnesAllBringAll) {
  for (const int shards : {1, 2, 5}) {
    for (const int replicas : {1, 2, 3}) {
      const GroupShape shape{0, shards * replicas, shards, replicas};
      for (int f = 0; f < shards; ++f) {
        const Range whole = shard_range(13, shards, f);
        std::int64_t next = whole.begin;
        for (int r = 0; r < replicas; ++r) {
          EXPECT_EQ(slice_range(13, shape, r, f, Scheme::naive), whole);
          const Range slice = slice_range(13, shape, r, f, Scheme::leader);
          EXPECT_EQ(slice.begin, next);
          EXPECT_EQ(slice.size(), r == f % replicas ? whole.size() : 0);
          next = slice.end;
        }
        EXPECT_EQ(next, whole.end);
      }
    }
  }
}

TEST(Ranges, BucketsCutAcrossUnits) {
  const std::vector<std::int64_t> units{5, 0, 7};
  const std::vector<Range> held{{1, 5}, {0, 0}, {0, 6}};
  const auto cut = [&](const Buckets& buckets) {
    std::vector<std::vector<std::int64_t>> pieces;
    for (const BucketPiece& p : cut_into_buckets(buckets, units, held)) {
      pieces.push_back({p.bucket, p.unit, p.range.begin, p.range.end});
    }
    return pieces;
  };
  using Pieces = std::vector<std::vector<std::int64_t>>;
  EXPECT_EQ(cut({}), (Pieces{{0, 0, 1, 5}, {0, 2, 0, 6}}));
  EXPECT_EQ(cut({Buckets::By::unit}), (Pieces{{0, 0, 1, 5}, {2, 2, 0, 6}}));
  EXPECT_EQ(cut({Buckets::By::size, 4}), (Pieces{{0, 0, 1, 4}, {1, 0, 4, 5}, {1, 2, 0, 3}, {2, 2, 3, 6}}));
  EXPECT_EQ(cut({Buckets::By::size, 12}), (Pieces{{0, 0, 1, 5}, {0, 2, 0, 6}}));
  EXPECT_EQ(bucket_count({}, units), 1);
  EXPECT_EQ(bucket_count({Buckets::By::unit}, units), 3);
  EXPECT_EQ(bucket_count({Buckets::By::size, 4}, units), 3);
  EXPECT_EQ(bucket_count({Buckets::By::size, 5}, units), 3);
}

// Every element lies in exactly one part, of exactly one holder in each group, or with naive of one in each row of
// replicas; and all holders agree on the part, which lies in one bucket.
void expect_consistent(const Layout& layout, const std::vector<std::int64_t>& units, const ExchangeRules& rules) {
  const bool naive = rules.scheme == Scheme::naive;
  std::map<std::tuple<int, std::int64_t, int, int>, int> seen;  // (unit, element, group, row) -> times
  std::map<std::tuple<int, std::int64_t, int>, ExchangePart> by_begin;
  for (int rank = 0; rank < layout.world(); ++rank) {
    const int group = layout.group_of(rank), row = naive ? layout.at(rank).replica : 0;
    const std::vector<int> peers = layout.federation_peers(rank);
    std::int64_t bucket = 0;
    for (const ExchangePart& part : exchange_parts(layout, units, rank, rules)) {
      ASSERT_EQ(part.holders[group], rank);
      ASSERT_LE(bucket, part.bucket);
      bucket = part.bucket;
      ASSERT_LT(bucket, bucket_count(rules.buckets, units));
      for (const int holder : part.holders) ASSERT_TRUE(std::binary_search(peers.begin(), peers.end(), holder));
      for (std::int64_t e = part.range.begin; e < part.range.end; ++e) ++seen[{part.unit, e, group, row}];
      const auto [place, fresh] = by_begin.try_emplace({part.unit, part.range.begin, row}, part);
      if (!fresh) {
        ASSERT_EQ(place->second.range, part.range);
        ASSERT_EQ(place->second.owner, part.owner);
        ASSERT_EQ(place->second.holders, part.holders);
        ASSERT_EQ(place->second.bucket, part.bucket);
      }
    }
  }
  std::int64_t expected = 0;
  for (const std::int64_t numel : units) expected += numel * layout.groups() * (naive ? layout.group(0).replicas : 1);
  ASSERT_EQ(static_cast<std::int64_t>(seen.size()), expected);
  for (const auto& [key, times] : seen) ASSERT_EQ(times, 1);
}

TEST(Ranges, ExchangePartsFitTogetherInRandomLayouts) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<int> sizes, shards, replicas;
    int world = 0;
    const int groups = 1 + static_cast<int>(random() % 4);
    const Scheme scheme = kSchemes[trial % 3];
    for (int g = 0; g < groups; ++g) {
      shards.push_back(1 + static_cast<int>(random() % 4));
      replicas.push_back(g > 0 && scheme == Scheme::naive ? replicas[0] : 1 + static_cast<int>(random() % 3));
      sizes.push_back(shards.back() * replicas.back());
      world += sizes.back();
    }
    const Layout layout = Layout::make(world, {.groups = sizes, .shard_degree = shards, .replicate_degree = replicas});
    const std::vector<std::int64_t> units{1, 2, 13, static_cast<std::int64_t>(1 + random() % 60)};
    const auto size = static_cast<std::int64_t>(1 + random() % 80);
    for (const Buckets& buckets : {Buckets{}, Buckets{Buckets::By::unit}, Buckets{Buckets::By::size, size}}) {
      expect_consistent(layout, units, {scheme, buckets});
    }
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

// One parameter may have more elements, and of each group's part more bytes, than 32 bits count.
TEST(Ranges, CountBeyond32Bits) {
  const std::int64_t numel = (std::int64_t{1} << 35) + 7;
  for (const Layout& layout :
       {Layout::make(2, {.groups = 2}), Layout::make(4, {.groups = std::vector<int>{1, 3}}),
        Layout::make(6, {.groups = std::vector<int>{4, 2}, .shard_degree = 2, .replicate_degree = -1})}) {
    std::vector<Range> owned;
    for (int rank = 0; rank < layout.world(); ++rank) {
      for (const ExchangePart& part : exchange_parts(layout, std::vector<std::int64_t>{13, numel}, rank)) {
        if (part.unit == 1 && part.owner == layout.group_of(rank)) owned.push_back(part.range);
      }
    }
    std::sort(owned.begin(), owned.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    std::int64_t next = 0, largest = 0;
    for (const Range& range : owned) {
      ASSERT_EQ(range.begin, next) << layout.describe();
      next = range.end;
      largest = std::max(largest, range.size());
    }
    EXPECT_EQ(next, numel) << layout.describe();
    EXPECT_GT(largest, std::int64_t{1} << 32);
  }
}

}  // namespace
}  // namespace fedshard::topology
