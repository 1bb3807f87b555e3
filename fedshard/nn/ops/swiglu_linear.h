// The gated activation of Llama's feed-forward layer, silu(gate) * up (Shazeer, arXiv:2002.05202), and the projection
// that reads it, as one operation.
//
// A plain composition keeps four [.., I] tensors for backward (gate, up, silu(gate) and the product). This keeps gate,
// up and the product; with `recompute` the product is made again too. Either way the arithmetic is the same code on the
// same values, so the gradients are equal to the bit.
#pragma once
#include <ATen/core/Tensor.h>

namespace fedshard::nn {

// gate and up [..., I], matrix [O, I], all of one floating dtype; returns (silu(gate) * up) matrix^T, [..., O] of that
// dtype. Differentiable in all three.
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& matrix, bool recompute);

// The same as a plain composition of ATen operations: the reference of the tests.
at::Tensor swiglu_linear_reference(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& matrix);

}  // namespace fedshard::nn
