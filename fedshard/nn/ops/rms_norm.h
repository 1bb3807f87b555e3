// Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467).
//
// The statistics and the scaling are fp32 whatever the input; the result is rounded to the input's dtype BEFORE the
// weight multiplies it. That is where Hugging Face's Llama rounds; at::rms_norm rounds once, after the weight, and so
// differs in bf16.
#pragma once
#include <ATen/core/Tensor.h>

namespace fedshard::nn {

// x [..., H] floating point, weight [H] of x's dtype; returns [..., H] of x's dtype. Differentiable in both.
// Keeps for backward only x, weight and one fp32 number a row; everything else is recomputed.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

// The same as a plain composition of ATen operations: the reference of the tests.
at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps);

// The steps of the above for operations that have a norm inside; they record no graph.

// One fp32 number a row, [..., 1]: rsqrt(mean(x^2) + eps).
at::Tensor rms_norm_scale(const at::Tensor& x, double eps);

// rms_norm(x, weight, eps) from x's scale; the same bits whenever it is computed.
at::Tensor rms_norm_output(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale);

struct RmsNormGradients {
  at::Tensor x, weight;  // undefined where not wanted
};
RmsNormGradients rms_norm_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& scale, bool x_wanted, bool weight_wanted);

}  // namespace fedshard::nn
