// A norm and the projections that read its output, as one operation: what a block begins its two halves with.
//
// Fused so that the normed hidden states need not be kept: with `recompute`, backward makes them again from the hidden
// states, which live anyway as the residual's, and one number a row. Either way the arithmetic is the same code on the
// same values, so the gradients are equal to the bit.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace fedshard::nn {

// x [..., H], weight [H], matrices [O_i, H], all of one floating dtype. Returns rms_norm(x, weight, eps) times each
// matrix's transpose: [..., O_i] of that dtype. Differentiable in all of them; keeps x, weight, the matrices, one fp32
// number a row and, unless `recompute`, the norm's output.
std::vector<at::Tensor> norm_linears(const at::Tensor& x, const at::Tensor& weight, double eps,
                                     const std::vector<at::Tensor>& matrices, bool recompute);

// The same as a plain composition of ATen operations: the reference of the tests.
std::vector<at::Tensor> norm_linears_reference(const at::Tensor& x, const at::Tensor& weight, double eps,
                                               const std::vector<at::Tensor>& matrices);

}  // namespace fedshard::nn
