// The learning rate as a function of the step: linear warm-up, a stable phase, then decay to a floor. Pure arithmetic.
//
// With a stable phase this is the warm-up-stable-decay schedule (Hu et al., arXiv 2404.06395), as torchtitan has it:
// the full rate until the last decay_steps steps. A surprise: the last step of a decay does not yet use the floor,
// because its first step still uses the full rate.
#pragma once
#include <cstdint>

namespace fedshard::optim {

struct LrSchedule {
  enum class Decay { none, linear, cosine };
  double lr = 3e-4;  // after the warm-up
  std::int64_t warmup_steps = 0;
  Decay decay = Decay::cosine;
  std::int64_t decay_steps = 0;   // from the end of the stable phase; after them the rate stays at its floor
  double min_lr_factor = 0;       // the floor, as a part of lr
  std::int64_t stable_steps = 0;  // between warm-up and decay

  // For the update number `step`, counted from 1. The first update of a warm-up over n steps uses lr / n, the n-th lr.
  double at(std::int64_t step) const;
};

}  // namespace fedshard::optim
