#include "fedshard/topology/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

#include "fedshard/base/error.h"

namespace fedshard::topology {
namespace {

std::string refusal(int world, const LayoutOptions& options) {
  try {
    Layout::make(world, options);
  } catch (const base::Error& e) {
    EXPECT_EQ(e.status(), base::ExitStatus::usage);
    return e.what();
  }
  ADD_FAILURE() << "a layout of " << world << " ranks was accepted";
  return "";
}

// Calls `visit` with every list of positive sizes that sums to `world`.
void for_each_composition(int world, std::vector<int>& sizes, const std::function<void()>& visit) {
  if (world == 0) return visit();
  for (int size = 1; size <= world; ++size) {
    sizes.push_back(size);
    for_each_composition(world - size, sizes, visit);
    sizes.pop_back();
  }
}

// Calls `visit` with every choice of one divisor by group.
void for_each_shards(const std::vector<int>& sizes, std::vector<int>& shards, const std::function<void()>& visit) {
  if (shards.size() == sizes.size()) return visit();
  for (int f = 1; f <= sizes[shards.size()]; ++f) {
    if (sizes[shards.size()] % f != 0) continue;
    shards.push_back(f);
    for_each_shards(sizes, shards, visit);
    shards.pop_back();
  }
}

// The lists of peers of all ranks are equal within a list and cover the world once.
void expect_partition(const Layout& layout, const std::function<std::vector<int>(int)>& peers_of) {
  std::multiset<int> seen;
  std::set<std::vector<int>> distinct;
  for (int rank = 0; rank < layout.world(); ++rank) {
    const auto peers = peers_of(rank);
    ASSERT_TRUE(std::find(peers.begin(), peers.end(), rank) != peers.end());
    ASSERT_TRUE(std::is_sorted(peers.begin(), peers.end()));
    distinct.insert(peers);
  }
  for (const auto& peers : distinct) seen.insert(peers.begin(), peers.end());
  std::vector<int> world(static_cast<std::size_t>(layout.world()));
  std::iota(world.begin(), world.end(), 0);
  ASSERT_EQ(std::vector<int>(seen.begin(), seen.end()), world);
}

void expect_sound(const Layout& layout) {
  std::set<std::vector<int>> places;
  for (int rank = 0; rank < layout.world(); ++rank) {
    const auto c = layout.at(rank);
    const auto& shape = layout.group(c.group);
    ASSERT_EQ(layout.group_of(rank), c.group);
    ASSERT_EQ(layout.rank_of(c.group, c.replica, c.shard), rank);
    ASSERT_EQ(c.local, c.replica * shape.shards + c.shard);
    ASSERT_EQ(shape.first_rank + c.local, rank);
    ASSERT_TRUE(places.insert({c.group, c.replica, c.shard}).second);
    const auto shard_peers = layout.shard_peers(rank);
    ASSERT_EQ(static_cast<int>(shard_peers.size()), shape.shards);
    ASSERT_EQ(shard_peers.back() - shard_peers.front(), shape.shards - 1);  // the shard axis is contiguous
    for (const int peer : shard_peers) ASSERT_EQ(layout.at(peer).replica, c.replica);
    const auto replica_peers = layout.replica_peers(rank);
    ASSERT_EQ(static_cast<int>(replica_peers.size()), shape.replicas);
    for (const int peer : replica_peers) ASSERT_EQ(layout.at(peer).shard, c.shard);
    ASSERT_EQ(static_cast<int>(layout.group_peers(rank).size()), shape.ranks);
  }
  expect_partition(layout, [&](int rank) { return layout.shard_peers(rank); });
  expect_partition(layout, [&](int rank) { return layout.replica_peers(rank); });
  expect_partition(layout, [&](int rank) { return layout.group_peers(rank); });
  expect_partition(layout, [&](int rank) { return layout.federation_peers(rank); });
  for (int rank = 0; rank < layout.world(); ++rank) {
    const auto peers = layout.federation_peers(rank);
    std::set<int> groups;
    for (const int peer : peers) groups.insert(layout.group_of(peer));
    ASSERT_EQ(static_cast<int>(groups.size()), layout.groups());
    if (layout.equal_groups()) {
      ASSERT_EQ(static_cast<int>(peers.size()), layout.groups());
    }
  }
}

TEST(Layout, EverySmallLayoutIsABijectionAndItsPeersPartitionTheWorld) {
  int layouts = 0;
  for (int world = 1; world <= 8; ++world) {
    std::vector<int> sizes;
    for_each_composition(world, sizes, [&] {
      std::vector<int> shards;
      for_each_shards(sizes, shards, [&] {
        const auto layout = Layout::make(world, {sizes, shards, rest_of_group});
        ASSERT_EQ(layout.sizes(), sizes);
        for (int g = 0; g < layout.groups(); ++g) {
          ASSERT_EQ(layout.group(g).shards, shards[static_cast<std::size_t>(g)]);
        }
        expect_sound(layout);
        ++layouts;
      });
    });
  }
  EXPECT_GT(layouts, 1000);
}

TEST(Layout, NumbersAndListsSayTheSame) {
  for (int world : {1, 2, 6, 7, 12, 13}) {
    for (int groups = 1; groups <= world; ++groups) {
      if (world % groups != 0) continue;
      const int size = world / groups;
      for (int f = 1; f <= size; ++f) {
        if (size % f != 0) continue;
        const auto n = static_cast<std::size_t>(groups);
        const auto by_number = Layout::make(world, {groups, f, size / f});
        EXPECT_EQ(by_number.shapes(), Layout::make(world, {groups, f, rest_of_group}).shapes());
        EXPECT_EQ(by_number.shapes(), Layout::make(world, {groups, rest_of_group, size / f}).shapes());
        const LayoutOptions lists{std::vector<int>(n, size), std::vector<int>(n, f), std::vector<int>(n, size / f)};
        EXPECT_EQ(by_number.shapes(), Layout::make(world, lists).shapes());
        EXPECT_TRUE(by_number.equal_groups());
      }
    }
  }
}

TEST(Layout, NamesTheNumbersByTheTable) {
  const auto name = [](int world, const LayoutOptions& options) { return Layout::make(world, options).strategy(); };
  EXPECT_EQ(name(4, {1, 1, -1}), "ddp");
  EXPECT_EQ(name(4, {}), "fsdp");
  EXPECT_EQ(name(4, {1, 2, 2}), "hsdp");
  EXPECT_EQ(name(4, {2, 1, -1}), "fl+ddp");
  EXPECT_EQ(name(4, {2, -1, 1}), "fl+fsdp");
  EXPECT_EQ(name(8, {2, 2, -1}), "fl+hsdp");
  EXPECT_EQ(name(1, {}), "ddp");
  EXPECT_EQ(name(3, {3, -1, 1}), "fl+ddp");
  EXPECT_EQ(name(4, {std::vector{1, 3}, -1, 1}), "fl+fsdp");
  EXPECT_EQ(name(6, {std::vector{3, 3}, std::vector{1, 3}, -1}), "fl+hsdp");
}

TEST(Layout, DescribesItselfInOneLine) {
  EXPECT_EQ(Layout::make(8, {2, 2, -1}).describe(), "fl+hsdp: 8 ranks = 2 groups x 2 replicas x 2 shards");
  EXPECT_EQ(Layout::make(1, {}).describe(), "ddp: 1 rank = 1 group x 1 replica x 1 shard");
  EXPECT_EQ(Layout::make(6, {std::vector{4, 2}, 2, -1}).describe(),
            "fl+hsdp: 6 ranks = 2 groups of 4 (2 replicas x 2 shards), 2 (1 replica x 2 shards)");
}

TEST(Layout, RefusesTheImpossibleByNamingBothNumbers) {
  EXPECT_EQ(refusal(5, {std::vector{2, 2}, -1, 1}), "5 ranks cannot be split into groups of 2 and 2 (sum 4)");
  EXPECT_EQ(refusal(5, {2, -1, 1}),
            "5 ranks cannot be split into 2 equal groups (1 left over); give their sizes as a list");
  EXPECT_EQ(refusal(3, {4, -1, 1}), "3 ranks cannot be split into 4 groups");
  EXPECT_EQ(refusal(6, {1, 4, -1}), "a group of 6 ranks cannot have 4 shards: 4 does not divide 6 (group 0)");
  EXPECT_EQ(refusal(6, {1, -1, 4}), "a group of 6 ranks cannot have 4 replicas: 4 does not divide 6 (group 0)");
  EXPECT_EQ(refusal(6, {1, 3, 1}),
            "a group of 6 ranks cannot be 1 replica of 3 shards (3 ranks); set one degree to -1 (group 0)");
  EXPECT_EQ(refusal(4, {1, 4, 4}),
            "a group of 4 ranks cannot be 4 replicas of 4 shards (16 ranks); set one degree to -1 (group 0)");
  EXPECT_EQ(refusal(7, {std::vector{4, 3}, 2, -1}),
            "a group of 3 ranks cannot have 2 shards: 2 does not divide 3 (group 1)");
  EXPECT_EQ(refusal(4, {2, std::vector{2}, 1}), "the shard degree lists 1 numbers for 2 groups; give one by group");
  EXPECT_EQ(refusal(4, {2, std::vector{-1, 2}, std::vector{-1, 1}}),
            "the shard degree and the replicate degree of group 0 are both -1; give one of them");
}

TEST(Layout, RefusesNumbersOutOfRange) {
  EXPECT_EQ(refusal(0, {}), "a run needs at least 1 rank, not 0");
  EXPECT_EQ(refusal(2, {0, -1, 1}), "groups must be at least 1, not 0");
  EXPECT_EQ(refusal(2, {-1, -1, 1}), "groups must be at least 1, not -1");
  EXPECT_EQ(refusal(2, {std::vector<int>{}, -1, 1}), "the list of group sizes is empty");
  EXPECT_EQ(refusal(2, {std::vector{2, 0}, -1, 1}), "a group must have at least 1 rank, not 0 (groups of 2, 0)");
  EXPECT_EQ(refusal(2, {1, 0, 1}), "the shard degree must be at least 1, or -1 for what is left of the group, not 0");
  EXPECT_EQ(refusal(2, {1, 1, -2}),
            "the replicate degree must be at least 1, or -1 for what is left of the group, not -2");
  const int big = 2147483647;  // the sum and the product must not wrap around
  refusal(2, {std::vector{big, big, 4}, -1, 1});
  refusal(big - 1, {std::vector{big, big}, -1, 1});
}

TEST(Layout, PeersAtARoundAreKeptTogetherWhereShardsAllowIt) {
  using List = std::vector<int>;
  const auto shards_alike = Layout::make(8, {List{4, 2, 2}, 2, -1});
  EXPECT_EQ(shards_alike.federation_peers(0), (List{0, 2, 4, 6}));
  EXPECT_EQ(shards_alike.federation_peers(7), (List{1, 3, 5, 7}));
  EXPECT_EQ(Layout::make(4, {List{1, 3}, -1, 1}).federation_peers(2), (List{0, 1, 2, 3}));
  EXPECT_EQ(Layout::make(8, {2, 2, 2}).federation_peers(5), (List{1, 5}));
}

TEST(Layout, AsksOutsideTheWorldAreInternalErrors) {
  const auto layout = Layout::make(4, {2, -1, 1});
  EXPECT_THROW(layout.at(4), base::RunError);
  EXPECT_THROW(layout.at(-1), base::RunError);
  EXPECT_THROW(layout.rank_of(2, 0, 0), base::RunError);
  EXPECT_THROW(layout.rank_of(0, 1, 0), base::RunError);
  EXPECT_THROW(layout.rank_of(0, 0, 2), base::RunError);
}

}  // namespace
}  // namespace fedshard::topology
