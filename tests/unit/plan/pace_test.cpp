#include "fedshard/plan/pace.h"

#include <gtest/gtest.h>

#include <functional>

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

using By = Pace::By;

Pace by_group(std::vector<std::int64_t> steps) { return {.by = By::group_steps, .by_group = std::move(steps)}; }
Pace of_tokens(std::int64_t count) { return {.by = By::tokens, .count = count}; }
Pace of_seconds(double seconds) { return {.by = By::seconds, .seconds = seconds}; }

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const base::UsageError& e) {
    return e.what();
  }
  ADD_FAILURE() << "was accepted";
  return "";
}

TEST(Pace, IsReadFromNumberAndUnit) {
  for (const auto& [text, pace] : std::vector<std::pair<std::string, Pace>>{{"30s", of_seconds(30)},
                                                                            {"0.25 s", of_seconds(0.25)},
                                                                            {"1.5m", of_seconds(90)},
                                                                            {"168h", of_seconds(604800)},
                                                                            {"1 tokens", of_tokens(1)},
                                                                            {"250000tokens", of_tokens(250000)},
                                                                            {"1.1M tokens", of_tokens(1100000)},
                                                                            {"0.001k tokens", of_tokens(1)},
                                                                            {"2G tokens", of_tokens(2000000000)},
                                                                            {"1e6 tokens", of_tokens(1000000)}}) {
    EXPECT_EQ(parse_pace(text), pace) << text;
    EXPECT_EQ(parse_pace(describe(pace)), pace) << describe(pace);
  }
  EXPECT_EQ(describe(Pace::of_steps(8)), "8");
  EXPECT_EQ(describe(by_group({8, 4})), "[8, 4]");
}

TEST(Pace, RefusesWhatIsNoLengthOfARound) {
  for (const char* text : {"", " ", "s", "30", "30 seconds", "s30", "30s ", " 30s", "30sec", "tokens", "5 K tokens",
                           "5k", "5  Mtokens", "1,000 tokens", "+3s", "0x10s", "1e999s"}) {
    EXPECT_NE(refusal([&] { parse_pace(text); }).find("is no length of a round: write seconds"), std::string::npos)
        << text;
  }
  for (const char* text : {"0s", "-1s", "nans", "infs", "604801s", "169h"}) {
    EXPECT_NE(refusal([&] { parse_pace(text); }).find("more than 0 seconds and at most a week"), std::string::npos)
        << text;
  }
  for (const char* text : {"0 tokens", "-5 tokens", "1.5 tokens", "0.0001k tokens", "nan tokens", "1e16 tokens"}) {
    EXPECT_NE(refusal([&] { parse_pace(text); }).find("a whole number of tokens"), std::string::npos) << text;
  }
}

TEST(Pace, IsEvenWhereAllGroupsMakeAsManySteps) {
  EXPECT_TRUE(Pace::of_steps(3).is_even());
  EXPECT_TRUE(by_group({3}).is_even());
  EXPECT_TRUE(by_group({3, 3, 3}).is_even());
  EXPECT_FALSE(by_group({3, 3, 2}).is_even());
  EXPECT_FALSE(of_tokens(1).is_even());
  EXPECT_FALSE(of_seconds(1).is_even());
  EXPECT_EQ(most_steps(Pace::of_steps(3)), 3);
  EXPECT_EQ(most_steps(by_group({3, 7, 2})), 7);
  EXPECT_EQ(most_steps(of_tokens(1000)), 1);
  EXPECT_EQ(most_steps(of_seconds(1000)), 1);
}

TEST(Pace, ARoundHasAStepAndThenIsOverWhereItsMeasureIsFull) {
  const SinceRound nothing{}, skipped{100, 0, 0.5}, much{2, 1000, 10};
  for (const Pace& pace : {Pace::of_steps(1), by_group({1, 5}), of_tokens(1), of_seconds(1e-9)}) {
    EXPECT_FALSE(round_is_over(pace, 0, nothing)) << describe(pace);
    EXPECT_FALSE(round_is_over(pace, 0, {0, 1000, 10})) << describe(pace);
    EXPECT_TRUE(round_is_over(pace, 0, much)) << describe(pace);
  }
  EXPECT_TRUE(round_is_over(by_group({2, 3}), 0, much));
  EXPECT_FALSE(round_is_over(by_group({2, 3}), 1, much));
  EXPECT_TRUE(round_is_over(of_tokens(1000), 1, much));
  EXPECT_FALSE(round_is_over(of_tokens(1001), 1, much));
  EXPECT_FALSE(round_is_over(of_tokens(1), 0, skipped));
  EXPECT_TRUE(round_is_over(of_seconds(10), 1, much));
  EXPECT_FALSE(round_is_over(of_seconds(10.1), 1, much));
}

TEST(Pace, FitsTheGroupsAndTheRun) {
  check_pace(Pace::of_steps(8), 3, 20, 2, 4);    // ends in mid-round, and has what even rounds may have
  check_pace(by_group({8, 8, 8}), 3, 20, 2, 4);  // likewise
  check_pace(by_group({8, 3, 4}), 3, 24, 0, 1);
  check_pace(by_group({8, 3, 4}), 3, 0, 0, 1);  // the warm-up is all of the run
  check_pace(by_group({7}), 1, 20, 0, 1);       // one group has no rounds
  check_pace(of_tokens(7), 2, 20, 0, 1);
  check_pace(of_seconds(7), 2, 20, 0, 1);
  EXPECT_NE(refusal([] {
              check_pace(by_group({8, 4}), 3, 24, 0, 1);
            }).find("2 numbers, but the number of groups is 3"),
            std::string::npos);
  EXPECT_NE(refusal([] { check_pace(by_group({8}), 2, 24, 0, 1); }).find("1 numbers"), std::string::npos);
  EXPECT_NE(refusal([] {
              check_pace(by_group({8, 4}), 2, 20, 0, 1);
            }).find("must be a multiple of 8"),
            std::string::npos);
  for (const Pace& pace : {by_group({8, 4}), of_tokens(7), of_seconds(7)}) {
    EXPECT_NE(refusal([&] { check_pace(pace, 2, 24, 1, 1); }).find("delay = 1 counts on steps that all groups share"),
              std::string::npos);
    EXPECT_NE(refusal([&] { check_pace(pace, 2, 24, 0, 2); }).find("set fragments = 1, or every to one number"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace fedshard::plan
