// The learning rate as a function of the step: linear warm-up, then decay to a floor. Pure arithmetic.
#pragma once
#include <cstdint>

namespace fedshard::optim {

struct LrSchedule {
  enum class Decay { none, linear, cosine };
  double lr = 3e-4;  // after warm-up
  std::int64_t warmup_steps = 0;
  Decay decay = Decay::cosine;
  std::int64_t decay_steps = 0;  // from the end of the warm-up; after them the rate stays at its floor
  double min_lr_factor = 0;      // the floor, as a part of lr

  // For the update number `step`, counted from 1. The first update of a warm-up over n steps uses lr / n, the n-th lr.
  double at(std::int64_t step) const;
};

}  // namespace fedshard::optim
