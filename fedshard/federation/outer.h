// The outer optimizers: from the anchor and the groups' mean to the new parameters.
//
// With x the anchor, g = factor * (x - mean) the clipped pseudo-gradient, m and v the moments and eta = lr:
//
//   fedavg      x' = x - eta g                                                   McMahan et al., arXiv 1602.05629
//   fedavgm     m' = momentum m + g                     x' = x - eta m'          Hsu et al., arXiv 1909.06335
//   nesterov    m' = momentum m + g     x' = x - eta (g + momentum m')           DiLoCo, arXiv 2311.08105, which means
//                                                       torch.optim.SGD(nesterov=True, dampening=0)
//   fedadam     m' = beta1 m + (1 - beta1) g            x' = x - eta m' / (sqrt(v') + tau)
//               v' = beta2 v + (1 - beta2) g^2          Reddi et al., arXiv 2003.00295, Algorithm 2
//   fedyogi     the same with v' = v - (1 - beta2) g^2 sign(v - g^2)
//   fedadagrad  the same with v' = v + g^2
//
// All signs are those of a gradient. Reddi et al. write Delta = mean - x = -g and add instead of subtracting: their m
// is the negative of ours. As in their Algorithm 2 there is no bias correction, and v starts at tau^2.
//
// A surprise: every element is worked out alone, in fp64, and rounded once, so that the same element has the same bits
// however the model is cut over ranks and replicas. And where the step is the whole pseudo-gradient, the result is the
// mean itself, because x - (x - mean) has other bits: fedavgm and nesterov without momentum are fedavg, bit for bit.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>

#include "fedshard/plan/outer.h"

namespace fedshard::federation {

using plan::OuterOptions;

// What the pseudo-gradient is multiplied by: max_norm / norm where the norm is larger, otherwise exactly 1. `norm` is
// the whole model's. NaN of a norm that is NaN: such a pseudo-gradient must not look sound.
double clip_factor(const OuterOptions& options, double norm);

// One slice of the model, of any size. `parameters` holds the anchor and receives the new parameters; `mean` is the
// groups' weighted mean; `moments` are as many as plan::outer_moments_of says and are updated. All: [n] fp32,
// contiguous, on the CPU, with the same n. fedavg with lr 1 and factor 1 copies the mean and needs no anchor: what
// `parameters` held does not matter. Otherwise what is not finite in the parameters, the mean or the first moment is
// not finite in the new parameters. Not to be undone: call it after the commit.
void outer_step(const OuterOptions& options, at::Tensor& parameters, const at::Tensor& mean,
                std::span<at::Tensor> moments, double factor);

}  // namespace fedshard::federation
