#include "fedshard/optim/segments.h"

#include <gtest/gtest.h>

namespace fedshard::optim {
namespace {

// Elements 0..12 matrix, 12..17 and 17..18 vectors, 18..22 matrix, 22..26 a tensor of three dimensions.
plan::UnitSpec mixed_unit() {
  return {
      "unit",
      {{"matrix", {3, 4}, {}}, {"vector", {5}, {}}, {"one", {1}, {}}, {"square", {2, 2}, {}}, {"cube", {2, 1, 2}, {}}}};
}

using Segments = std::vector<Segment>;

TEST(Segments, OfTheWholeUnitAreTheRunsOfOneKind) {
  EXPECT_EQ(segments_of(mixed_unit(), {0, 26}), (Segments{{{0, 12}, true}, {{12, 18}, false}, {{18, 26}, true}}));
}

TEST(Segments, CutParametersWhereTheShardBeginsAndEnds) {
  EXPECT_EQ(segments_of(mixed_unit(), {5, 14}), (Segments{{{5, 12}, true}, {{12, 14}, false}}));
  EXPECT_EQ(segments_of(mixed_unit(), {13, 20}), (Segments{{{13, 18}, false}, {{18, 20}, true}}));
  EXPECT_EQ(segments_of(mixed_unit(), {2, 3}), (Segments{{{2, 3}, true}}));
  EXPECT_EQ(segments_of(mixed_unit(), {17, 18}), (Segments{{{17, 18}, false}}));
  EXPECT_EQ(segments_of(mixed_unit(), {12, 18}), (Segments{{{12, 18}, false}}));
}

TEST(Segments, OfAnEmptyShardAreNone) {
  for (const std::int64_t at : {0, 7, 12, 26}) EXPECT_EQ(segments_of(mixed_unit(), {at, at}), Segments{});
}

TEST(Segments, OfAUnitOfOneElement) {
  EXPECT_EQ(segments_of({"unit", {{"gain", {1}, {}}}}, {0, 1}), (Segments{{{0, 1}, false}}));
  EXPECT_EQ(segments_of({"unit", {{"scalar", {}, {}}}}, {0, 1}), (Segments{{{0, 1}, false}}));
  EXPECT_EQ(segments_of({"unit", {{"matrix", {1, 1}, {}}}}, {0, 1}), (Segments{{{0, 1}, true}}));
}

// However a unit is cut, the shards' segments tile it and every element has the decay of its parameter.
TEST(Segments, OfAllShardsTileTheUnit) {
  const plan::UnitSpec unit = mixed_unit();
  for (std::int64_t shards = 1; shards <= 30; ++shards) {
    std::int64_t next = 0;
    for (std::int64_t f = 0; f < shards; ++f) {
      for (const Segment& segment : segments_of(unit, topology::shard_range(unit.numel(), shards, f))) {
        ASSERT_EQ(segment.range.begin, next);
        ASSERT_GT(segment.range.size(), 0);
        next = segment.range.end;
        for (std::int64_t i = segment.range.begin; i < segment.range.end; ++i) {
          ASSERT_EQ(segment.decays, i < 12 || i >= 18) << "element " << i << " of " << shards << " shards";
        }
      }
    }
    ASSERT_EQ(next, unit.numel());
  }
}

}  // namespace
}  // namespace fedshard::optim
