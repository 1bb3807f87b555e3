#include "fedshard/plan/outer.h"

#include <cmath>

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

bool within(double value, double low, double below) { return value >= low && value < below; }  // false of NaN

void check(bool sound, const char* key, double value, const char* range) {
  if (!sound) base::fail<base::UsageError>("the outer optimizer's {} is {}, but must be {}", key, value, range);
}

}  // namespace

int outer_moments_of(Outer outer) {
  switch (outer) {
    case Outer::fedavg:
      return 0;
    case Outer::fedavgm:
    case Outer::nesterov:
      return 1;
    case Outer::fedadam:
    case Outer::fedyogi:
    case Outer::fedadagrad:
      return 2;
  }
  base::fail<base::RunError>("no outer optimizer has the number {}", static_cast<int>(outer));
}

OuterOptions usual_options(Outer outer) {
  OuterOptions options;
  options.outer = outer;
  if (outer == Outer::nesterov) options.lr = 0.7;
  if (outer_moments_of(outer) == 2) options.lr = 0.01;
  if (outer == Outer::fedadagrad) options.beta1 = 0;
  return options;
}

void check_options(const OuterOptions& options) {
  check(within(options.lr, 0, HUGE_VAL), "lr", options.lr, "0 or more");
  check(within(options.max_norm, 0, HUGE_VAL), "max_norm", options.max_norm, "0 (no clipping) or more");
  check(within(options.momentum, 0, 1), "momentum", options.momentum, "from 0 to below 1");
  check(within(options.beta1, 0, 1), "beta1", options.beta1, "from 0 to below 1");
  check(within(options.beta2, 0, 1), "beta2", options.beta2, "from 0 to below 1");
  check(options.tau > 0 && std::isfinite(options.tau), "tau", options.tau, "above 0");
}

float initial_moment(const OuterOptions& options, int moment) {
  const int moments = outer_moments_of(options.outer);
  base::require(moment >= 0 && moment < moments, "no moment {} among {}", moment, moments);
  return moment == 1 ? static_cast<float>(options.tau * options.tau) : 0.0F;
}

bool needs_anchor(const OuterOptions& options) {
  return options.outer != Outer::fedavg || options.lr != 1 || options.max_norm > 0;
}

}  // namespace fedshard::plan
