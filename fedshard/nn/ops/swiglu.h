// The gated activation of Llama's feed-forward layer: silu(gate) * up (Shazeer, arXiv:2002.05202).
//
// A plain composition keeps three [.., I] tensors for backward (gate, silu(gate), up); this one keeps two and computes
// silu(gate) again, which is the cheaper of the two wherever memory is short. Both round at the same places.
#pragma once
#include <ATen/core/Tensor.h>

namespace fedshard::nn {

// gate and up [..., I] of one dtype; returns [..., I] of that dtype. Differentiable in both.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

// The same as a plain composition of ATen operations: the reference of the tests.
at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up);

}  // namespace fedshard::nn
