#include "fedshard/federation/guard.h"

#include <gtest/gtest.h>

#include <limits>

namespace fedshard::federation {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

// The groups at fault, for norms and not their squares.
std::vector<int> at_fault(const std::vector<double>& norms, double limit) {
  std::vector<Contribution> contributions;
  for (const double norm : norms) contributions.push_back({norm * norm, false});
  std::vector<int> groups;
  const auto faults = faults_of(contributions, limit);
  for (std::size_t g = 0; g < faults.size(); ++g) {
    if (!faults[g].empty()) groups.push_back(static_cast<int>(g));
  }
  return groups;
}

using Groups = std::vector<int>;

TEST(Guard, WhatIsNotFiniteIsLeftOutWhateverTheLimit) {
  for (const double limit : {0.0, 2.0}) {
    EXPECT_EQ(at_fault({1, kNan, 1}, limit), Groups{1});
    EXPECT_EQ(at_fault({kInf, 1}, limit), Groups{0});
    EXPECT_EQ(at_fault({kNan, kInf}, limit), (Groups{0, 1}));
    EXPECT_EQ(at_fault({kNan}, limit), Groups{0});
  }
}

TEST(Guard, ANormIsHeldToTheMedianOfTheOthers) {
  EXPECT_EQ(at_fault({1, 2, 3, 100}, 10), Groups{3});
  EXPECT_EQ(at_fault({1, 2, 3, 19.9}, 10), Groups{});
  EXPECT_EQ(at_fault({1, 1, 100, 100}, 10), (Groups{2, 3}));  // of three others, two are small
  EXPECT_EQ(at_fault({1, 11}, 10), Groups{1});                // of two the larger, never both
  EXPECT_EQ(at_fault({1, 2, 3, 1e9}, 0), Groups{});
}

TEST(Guard, OthersThatAreLeftOutAreNoMeasure) {
  EXPECT_EQ(at_fault({1, kInf, 2, 1000}, 10), (Groups{1, 3}));
  EXPECT_EQ(at_fault({kNan, 1000}, 10), Groups{0});
}

TEST(Guard, GroupsThatHaveNotMovedMeasureNothing) {
  EXPECT_EQ(at_fault({0, 0, 5}, 10), Groups{});
  EXPECT_EQ(at_fault({0, 0}, 10), Groups{});
  EXPECT_EQ(at_fault({}, 10), Groups{});
}

TEST(Guard, SaysWhy) {
  const auto faults = faults_of(std::vector<Contribution>{{kNan, true}, {1, true}, {4, false}, {1e6, false}}, 10);
  EXPECT_EQ(faults[0], "it brings numbers that are not finite");
  EXPECT_EQ(faults[1], "its replicas hold different parameters");
  EXPECT_EQ(faults[2], "");
  EXPECT_EQ(faults[3], "the norm of what it brings is 1000, more than 10 times the others' median of 2");
}

}  // namespace
}  // namespace fedshard::federation
