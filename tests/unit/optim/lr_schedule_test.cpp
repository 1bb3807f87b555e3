#include "fedshard/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

namespace fedshard::optim {
namespace {

using Decay = LrSchedule::Decay;

constexpr double kLr = 0.02;

// What the schedule should be after `done` of `all` steps of the decay, as a part of kLr.
double part_left(Decay decay, std::int64_t done, std::int64_t all, double floor) {
  if (decay == Decay::none) return 1;
  if (done >= all) return floor;
  const double progress = static_cast<double>(done) / static_cast<double>(all);
  // cos^2(x/2) is (1 + cos x) / 2, said otherwise than the schedule says it.
  const double left = decay == Decay::linear ? 1 - progress : std::pow(std::cos(progress * std::numbers::pi / 2), 2);
  return floor + (1 - floor) * left;
}

TEST(LrSchedule, IsTheClosedFormAtEveryStep) {
  for (const std::int64_t warmup : {0, 1, 2, 7}) {
    for (const Decay decay : {Decay::none, Decay::linear, Decay::cosine}) {
      for (const std::int64_t decay_steps : {1, 2, 13, 100}) {
        for (const double floor : {0.0, 0.1, 1.0}) {
          const LrSchedule schedule{kLr, warmup, decay, decay_steps, floor};
          for (std::int64_t step = 1; step <= warmup + decay_steps + 20; ++step) {
            const double expected = step <= warmup ? kLr * static_cast<double>(step) / static_cast<double>(warmup)
                                                   : kLr * part_left(decay, step - warmup - 1, decay_steps, floor);
            ASSERT_NEAR(schedule.at(step), expected, 1e-15)
                << "warmup " << warmup << ", decay " << static_cast<int>(decay) << " over " << decay_steps << " to "
                << floor << ", step " << step;
          }
        }
      }
    }
  }
}

// The full rate from the end of the warm-up to the first step of the decay, then the decay that would have come at
// once.
TEST(LrSchedule, StableStepsComeBetweenWarmUpAndDecay) {
  for (const std::int64_t warmup : {0, 1, 5}) {
    for (const std::int64_t stable : {1, 2, 9}) {
      for (const Decay decay : {Decay::none, Decay::linear, Decay::cosine}) {
        for (const std::int64_t decay_steps : {0, 1, 7}) {
          const LrSchedule at_once{kLr, warmup, decay, decay_steps, 0.1};
          const LrSchedule schedule{kLr, warmup, decay, decay_steps, 0.1, stable};
          for (std::int64_t step = 1; step <= warmup; ++step) ASSERT_EQ(schedule.at(step), at_once.at(step));
          for (std::int64_t step = warmup + 1; step <= warmup + stable + 1; ++step) ASSERT_EQ(schedule.at(step), kLr);
          for (std::int64_t step = warmup + 1; step <= warmup + 30; ++step) {
            ASSERT_EQ(schedule.at(step + stable), at_once.at(step)) << "step " << step;
          }
        }
      }
    }
  }
}

TEST(LrSchedule, WithoutWarmUpBeginsWithTheFullRate) {
  for (const Decay decay : {Decay::none, Decay::linear, Decay::cosine}) {
    EXPECT_EQ((LrSchedule{kLr, 0, decay, 10, 0}.at(1)), kLr);
  }
}

TEST(LrSchedule, StaysAtItsFloorBeyondTheEnd) {
  for (const Decay decay : {Decay::linear, Decay::cosine}) {
    const LrSchedule schedule{kLr, 3, decay, 10, 0.25};
    EXPECT_GT(schedule.at(13), kLr * 0.25);
    for (const std::int64_t step : {14, 15, 1000, 1'000'000'000}) EXPECT_DOUBLE_EQ(schedule.at(step), kLr * 0.25);
  }
}

// A run that is all warm-up leaves no steps to decay over.
TEST(LrSchedule, WithoutDecayStepsKeepsTheRate) {
  for (const Decay decay : {Decay::none, Decay::linear, Decay::cosine}) {
    const LrSchedule schedule{kLr, 4, decay, 0, 0};
    EXPECT_DOUBLE_EQ(schedule.at(2), kLr / 2);
    for (const std::int64_t step : {4, 5, 100}) EXPECT_EQ(schedule.at(step), kLr);
  }
}

}  // namespace
}  // namespace fedshard::optim
