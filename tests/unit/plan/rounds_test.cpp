#include "fedshard/plan/rounds.h"

#include <gtest/gtest.h>

#include <limits>

#include <algorithm>
#include <numeric>

#include "fedshard/base/error.h"
#include "fedshard/plan/freeze.h"

namespace fedshard::plan {
namespace {

// Units of 1, 2, 3, ... elements, each with a stage of its own.
ModelPlan chain(int units) {
  ModelPlan plan;
  for (int u = 0; u < units; ++u) {
    const std::string name = fmt::format("u{}", u);
    plan.units.push_back({name, {{name + ".w", {u + 1}, {}}}});
    plan.stages.push_back({name, {u}});
  }
  return plan;
}

Op begin(int fragment) { return {.kind = OpKind::exchange, .fragment = fragment}; }
Op apply(int fragment) { return {.kind = OpKind::apply, .fragment = fragment}; }

TEST(Rounds, OfTheWholeModelEndEveryKthStep) {
  for (const std::int64_t every : {1, 2, 5}) {
    for (std::int64_t step = 1; step <= 3 * every; ++step) {
      const Schedule expected = step % every == 0 ? Schedule{begin(0), apply(0)} : Schedule{};
      EXPECT_EQ(round_operations({.every = every}, step), expected) << "K " << every << ", step " << step;
    }
  }
}

TEST(Rounds, ADelayAppliesLaterAndBeforeTheNextBegins) {
  EXPECT_EQ(round_operations({.every = 3, .delay = 2}, 2), Schedule{});  // nothing has begun yet
  EXPECT_EQ(round_operations({.every = 3, .delay = 2}, 3), Schedule{begin(0)});
  EXPECT_EQ(round_operations({.every = 3, .delay = 2}, 4), Schedule{});
  EXPECT_EQ(round_operations({.every = 3, .delay = 2}, 5), Schedule{apply(0)});
  EXPECT_EQ(round_operations({.every = 3, .delay = 3}, 3), Schedule{begin(0)});
  EXPECT_EQ(round_operations({.every = 3, .delay = 3}, 6), (Schedule{apply(0), begin(0)}));
  EXPECT_EQ(round_operations({.every = 1, .delay = 1}, 9), (Schedule{apply(0), begin(0)}));
}

TEST(Rounds, FragmentsTakeTurnsOverTheSteps) {
  const RoundOptions options{.every = 5, .fragments = 3, .delay = 1};
  const std::vector<Schedule> expected{{}, {begin(0)}, {apply(0)}, {begin(1)}, {apply(1), begin(2)}, {apply(2)}};
  for (std::int64_t step = 1; step <= 6; ++step) {
    EXPECT_EQ(round_operations(options, step), expected[static_cast<std::size_t>(step - 1)]) << step;
  }
}

TEST(Rounds, AreCountedFromTheEndOfTheWarmUp) {
  const RoundOptions options{.every = 3, .delay = 1, .start_step = 4};
  for (std::int64_t step = 1; step <= 6; ++step) EXPECT_EQ(round_operations(options, step), Schedule{}) << step;
  EXPECT_EQ(round_operations(options, 7), Schedule{begin(0)});
  EXPECT_EQ(round_operations(options, 8), Schedule{apply(0)});
  EXPECT_EQ(exchanges_of(options, 0, 6), 0);
  EXPECT_EQ(exchanges_of(options, 0, 7), 1);
  EXPECT_EQ(exchanges_of(options, 0, 12), 2);
}

// For any options: each fragment begins once in K steps, is applied `delay` steps later, and is never two at a time.
TEST(Rounds, OneExchangeIsUnderWayAtATime) {
  for (std::int64_t every = 1; every <= 9; ++every) {
    for (int fragments = 1; fragments <= every; ++fragments) {
      for (std::int64_t delay = 0; delay <= every / fragments; ++delay) {
        const RoundOptions options{every, fragments, delay};
        check_rounds(options);
        int under_way = -1;
        std::int64_t begun = 0;
        std::vector<int> applied(static_cast<std::size_t>(fragments), 0);
        std::int64_t begins = 0;
        for (std::int64_t step = 1; step <= 4 * every; ++step) {
          for (const Op& op : round_operations(options, step)) {
            if (op.kind == OpKind::exchange) {
              ASSERT_EQ(under_way, -1);
              under_way = op.fragment;
              begun = step;
              ++begins;
            } else {
              ASSERT_EQ(under_way, op.fragment);
              ASSERT_EQ(step - begun, delay);
              under_way = -1;
              ++applied[static_cast<std::size_t>(op.fragment)];
            }
          }
        }
        std::int64_t counted = 0;
        for (int f = 0; f < fragments; ++f) counted += exchanges_of(options, f, 4 * every);
        EXPECT_EQ(counted, begins);
        for (const int count : applied) EXPECT_GE(count, 3);
        EXPECT_EQ(std::accumulate(applied.begin(), applied.end(), under_way == -1 ? 0 : 1), 4 * fragments);
      }
    }
  }
}

TEST(Rounds, RefuseWhatCannotBe) {
  const auto refuses = [](const RoundOptions& options) {
    EXPECT_THROW(check_rounds(options), base::UsageError) << options.every << options.fragments << options.delay;
  };
  refuses({.every = 0});
  refuses({.every = 4, .fragments = 0});
  refuses({.every = 4, .fragments = 5});
  refuses({.every = 4, .delay = -1});
  refuses({.every = 4, .delay = 5});
  refuses({.every = 5, .fragments = 2, .delay = 3});
  check_rounds({.every = 5, .fragments = 2, .delay = 2});
}

TEST(Rounds, AScheduleIsItsStepsAndWhatFollowsEach) {
  const ModelPlan plan = chain(3);
  const std::size_t step = step_schedule(plan, {}).size();
  const Schedule plain = round_schedule(plan, {}, {.every = 4});
  ASSERT_EQ(plain.size(), 4 * step + 2);
  EXPECT_EQ(plain[4 * step], begin(0));
  EXPECT_EQ(plain.back(), apply(0));
  const Schedule delayed = round_schedule(plan, {}, {.every = 2, .delay = 1});
  ASSERT_EQ(delayed.size(), 2 * step + 2);
  EXPECT_EQ(delayed[step], apply(0));
  EXPECT_EQ(delayed.back(), begin(0));
}

TEST(Rounds, OfAnyLengthDoNotOverflow) {
  const RoundOptions endless{.every = std::numeric_limits<std::int64_t>::max(), .fragments = 3};
  for (int f = 0; f < 3; ++f) EXPECT_EQ(exchanges_of(endless, f, 1'000'000), 0);
  for (std::int64_t step = 1; step < 100; ++step) EXPECT_TRUE(round_operations(endless, step).empty());
}

// By fragment, which units are in it.
std::vector<std::vector<bool>> fragments_of(const ModelPlan& plan, int fragments) {
  std::vector<std::vector<bool>> units;
  for (const ModelPlan& of_fragment : fragment_plans(plan, fragments)) {
    units.emplace_back();
    for (const UnitSpec& unit : of_fragment.units) units.back().push_back(unit.is_exchanged());
  }
  return units;
}

TEST(Fragments, TakeTheUnitsThatTrainInTurn) {
  using Units = std::vector<bool>;
  EXPECT_EQ(fragments_of(chain(3), 1), std::vector<Units>{Units(3, true)});
  EXPECT_EQ(fragments_of(chain(5), 2), (std::vector<Units>{{1, 0, 1, 0, 1}, {0, 1, 0, 1, 0}}));
  EXPECT_EQ(fragments_of(freeze(chain(4), {"u1.w"}), 2), (std::vector<Units>{{1, 0, 0, 1}, {0, 0, 1, 0}}));
  EXPECT_THROW(fragments_of(chain(3), 4), base::UsageError);
  EXPECT_THROW(fragments_of(freeze(chain(3), {"u1.w"}), 3), base::UsageError);
}

}  // namespace
}  // namespace fedshard::plan
