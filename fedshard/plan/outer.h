// Which outer optimizer makes the groups' mean into the new parameters, and what state it keeps. Torch-free, so that
// configs, memory tables and traffic forecasts know it before any rank starts; federation/outer.h carries it out.
//
// A surprise: fedadagrad keeps a first moment too. Its paper runs it without (beta1 = 0), but writes it with one.
#pragma once

namespace fedshard::plan {

enum class Outer { fedavg, fedavgm, nesterov, fedadam, fedyogi, fedadagrad };

// The fp32 numbers kept for each element beside the anchor: 0; 1 (momentum) of fedavgm and nesterov; 2 (first and
// second moment) of the adaptive three.
int outer_moments_of(Outer outer);

struct OuterOptions {
  Outer outer = Outer::fedavg;
  double lr = 1;          // eta; at 0 the parameters stay, the moments go on
  double momentum = 0.9;  // fedavgm, nesterov
  double beta1 = 0.9;     // fedadam, fedyogi, fedadagrad
  double beta2 = 0.99;    // fedadam, fedyogi
  double tau = 1e-3;      // fedadam, fedyogi, fedadagrad: the smaller, the more adaptive
  double max_norm = 0;    // of the whole model's pseudo-gradient (federation/outer.h); 0: no clipping
  bool operator==(const OuterOptions&) const = default;
};

// Each optimizer's usual values. nesterov: lr 0.7, momentum 0.9 (DiLoCo). fedavg, fedavgm: lr 1, momentum 0.9 (Hsu et
// al.). The adaptive three: beta1 0.9 (fedadagrad: 0), beta2 0.99, tau 1e-3, as in the experiments of Reddi et al.
// Those tune lr by task; 0.01 is ours, and the furthest that an element can then move in the first round.
OuterOptions usual_options(Outer outer);

// Throws UsageError naming the value that is out of its range: lr and max_norm from 0, momentum, beta1 and beta2 from 0
// to below 1, tau above 0 (with 0 an element that never moves would be 0 / 0).
void check_options(const OuterOptions& options);

// What a moment starts at: tau^2 for the second one of the adaptive three, otherwise 0. `moment` counts from 0.
float initial_moment(const OuterOptions& options, int moment);

// Whether a step needs the anchor: plain fedavg, which replaces the parameters by their mean, does not.
bool needs_anchor(const OuterOptions& options);

}  // namespace fedshard::plan
