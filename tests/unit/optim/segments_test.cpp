#include "fedshard/optim/segments.h"

#include <gtest/gtest.h>

namespace fedshard::optim {
namespace {

using plan::Update;

// Elements 0..12 matrix, 12..17 and 17..18 vectors, 18..22 matrix, 22..26 a tensor of three dimensions.
plan::UnitSpec mixed_unit() {
  return {
      "unit",
      {{"matrix", {3, 4}, {}}, {"vector", {5}, {}}, {"one", {1}, {}}, {"square", {2, 2}, {}}, {"cube", {2, 1, 2}, {}}}};
}

const plan::UpdateRule decays{Update::adamw, 1, 0.5}, stays{Update::adamw, 1, 0}, muon{Update::muon, 1, 0.5};
const std::vector<plan::UpdateRule> rules{decays, stays, stays, decays, decays};

using Segments = std::vector<Segment>;

TEST(Segments, OfTheWholeUnitAreTheRunsOfOneRule) {
  EXPECT_EQ(segments_of(mixed_unit(), rules, {0, 26}),
            (Segments{{{0, 12}, 0, decays}, {{12, 18}, 1, stays}, {{18, 26}, 3, decays}}));
}

TEST(Segments, CutParametersWhereTheShardBeginsAndEnds) {
  EXPECT_EQ(segments_of(mixed_unit(), rules, {5, 14}), (Segments{{{5, 12}, 0, decays}, {{12, 14}, 1, stays}}));
  EXPECT_EQ(segments_of(mixed_unit(), rules, {13, 20}), (Segments{{{13, 18}, 1, stays}, {{18, 20}, 3, decays}}));
  EXPECT_EQ(segments_of(mixed_unit(), rules, {2, 3}), (Segments{{{2, 3}, 0, decays}}));
  EXPECT_EQ(segments_of(mixed_unit(), rules, {17, 18}), (Segments{{{17, 18}, 2, stays}}));
}

TEST(Segments, KeepMuonsMatricesApart) {
  const std::vector<plan::UpdateRule> with_muon{muon, stays, stays, muon, muon};
  EXPECT_EQ(segments_of(mixed_unit(), with_muon, {3, 26}),
            (Segments{{{3, 12}, 0, muon}, {{12, 18}, 1, stays}, {{18, 22}, 3, muon}, {{22, 26}, 4, muon}}));
}

TEST(Segments, DifferWhereAnyPartOfTheRuleDoes) {
  const std::vector<plan::UpdateRule> slower{decays, {Update::adamw, 0.5, 0}, stays, stays, {Update::adamw, 1, 0.1}};
  EXPECT_EQ(segments_of(mixed_unit(), slower, {0, 26}),
            (Segments{{{0, 12}, 0, decays}, {{12, 17}, 1, slower[1]}, {{17, 22}, 2, stays}, {{22, 26}, 4, slower[4]}}));
}

TEST(Segments, OfAnEmptyShardAreNone) {
  for (const std::int64_t at : {0, 7, 12, 26}) EXPECT_EQ(segments_of(mixed_unit(), rules, {at, at}), Segments{});
}

TEST(Segments, OfAUnitOfOneElement) {
  EXPECT_EQ(segments_of({"unit", {{"gain", {1}, {}}}}, {{stays}}, {0, 1}), (Segments{{{0, 1}, 0, stays}}));
  EXPECT_EQ(segments_of({"unit", {{"scalar", {}, {}}}}, {{stays}}, {0, 1}), (Segments{{{0, 1}, 0, stays}}));
}

// However a unit is cut, the shards' segments tile it and every element has the rule of its parameter.
TEST(Segments, OfAllShardsTileTheUnit) {
  const plan::UnitSpec unit = mixed_unit();
  const std::vector<double> decay_of_element = [&] {
    std::vector<double> elements;
    for (std::size_t p = 0; p < rules.size(); ++p) {
      elements.insert(elements.end(), static_cast<std::size_t>(unit.parameters[p].numel()), rules[p].weight_decay);
    }
    return elements;
  }();
  for (int shards = 1; shards <= 30; ++shards) {
    std::int64_t next = 0;
    for (int f = 0; f < shards; ++f) {
      for (const Segment& segment : segments_of(unit, rules, topology::shard_range(unit.numel(), shards, f))) {
        ASSERT_EQ(segment.range.begin, next);
        ASSERT_GT(segment.range.size(), 0);
        for (std::int64_t i = segment.range.begin; i < segment.range.end; ++i) {
          ASSERT_EQ(decay_of_element[static_cast<std::size_t>(i)], segment.rule.weight_decay) << "element " << i;
        }
        next = segment.range.end;
      }
    }
    EXPECT_EQ(next, unit.numel());
  }
}

}  // namespace
}  // namespace fedshard::optim
