#include "fedshard/shard/arena.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "fedshard/base/error.h"

namespace fedshard::shard {
namespace {

plan::ModelPlan two_units() {
  plan::ModelPlan plan;
  plan.units = {{"a", {{"a.w", {19}, {}}}}, {"b", {{"b.w", {3}, {}}}}};
  return plan;
}

TEST(ArenaMap, WholeOnesHaveOnePieceAUnit) {
  const ArenaMap map(two_units(), 2, 1);
  EXPECT_TRUE(map.is_whole());
  EXPECT_EQ(map.pieces(), (std::vector<ArenaPiece>{{0, {10, 19}, 0}, {1, {2, 3}, 16}}));
  EXPECT_EQ(map.real_numel(), 10);
  // All of unit b's fourth shard is padding.
  EXPECT_EQ(ArenaMap(two_units(), 4, 3).pieces(), (std::vector<ArenaPiece>{{0, {15, 19}, 0}}));
}

TEST(ArenaMap, PartsLieWithoutGaps) {
  const ArenaMap whole(two_units(), 2, 1);
  const ArenaMap map(whole, {{{10, 12}, {15, 18}}, {{2, 3}}});
  EXPECT_FALSE(map.is_whole());
  EXPECT_EQ(map.pieces(), (std::vector<ArenaPiece>{{0, {10, 12}, 0}, {0, {15, 18}, 2}, {1, {2, 3}, 5}}));
  EXPECT_EQ(map.numel(), 6);
  EXPECT_EQ(map.real_numel(), 6);
  EXPECT_EQ(map.range(0), (topology::Range{10, 19}));
  EXPECT_EQ(ArenaMap(whole, {{}, {}}).numel(), 0);
}

TEST(ArenaMap, RefusesPartsThatItCannotHold) {
  const ArenaMap whole(two_units(), 2, 1);
  using Ranges = std::vector<std::vector<topology::Range>>;
  for (const Ranges& kept :
       {Ranges{{}}, Ranges{{{9, 12}}, {}}, Ranges{{{18, 20}}, {}}, Ranges{{{12, 12}}, {}}, Ranges{{{12, 11}}, {}},
        Ranges{{{12, 15}, {14, 16}}, {}}, Ranges{{{15, 16}, {12, 13}}, {}}}) {
    EXPECT_THROW(ArenaMap(whole, kept), base::RunError);
  }
}

TEST(Arena, OfPartsGivesSlicesOfItsPieces) {
  const ArenaMap whole(two_units(), 2, 1);
  const ArenaMap map(whole, {{{10, 12}, {15, 18}}, {{2, 3}}});
  const Arena arena(map);
  arena.flat().copy_(at::arange(6));
  EXPECT_TRUE(at::equal(arena.slice(0, {10, 12}), at::arange(2).to(at::kFloat)));
  EXPECT_TRUE(at::equal(arena.slice(0, {16, 18}), at::arange(3, 5).to(at::kFloat)));
  EXPECT_TRUE(at::equal(arena.slice(1, {2, 3}), at::full({1}, 5.0f)));
  EXPECT_EQ(arena.slice(1, {2, 2}).numel(), 0);
  EXPECT_THROW(arena.slice(0, {11, 16}), base::RunError);  // in two pieces
  EXPECT_THROW(arena.slice(0, {12, 13}), base::RunError);
  EXPECT_THROW(arena.unit(0), base::RunError);
  EXPECT_THROW(arena.real(0), base::RunError);
}

}  // namespace
}  // namespace fedshard::shard
