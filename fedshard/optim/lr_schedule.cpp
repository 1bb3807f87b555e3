#include "fedshard/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fedshard::optim {

double LrSchedule::at(std::int64_t step) const {
  if (step <= warmup_steps) return lr * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (decay == Decay::none || decay_steps <= 0) return lr;
  // The first update of the decay still uses the full rate, as torch's schedulers do.
  const std::int64_t done = std::max<std::int64_t>(step - warmup_steps - stable_steps - 1, 0);
  const double progress = std::min(static_cast<double>(done) / static_cast<double>(decay_steps), 1.0);
  const double shape = decay == Decay::linear ? 1.0 - progress : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return lr * (min_lr_factor + (1.0 - min_lr_factor) * shape);
}

}  // namespace fedshard::optim
