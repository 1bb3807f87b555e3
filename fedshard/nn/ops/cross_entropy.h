// The sum of the tokens' cross-entropies: the last stage's result.
//
// The logits are the largest tensor of a step ([tokens, vocabulary]), so no fp32 copy of them is ever whole: forward
// and backward upcast a bounded number of rows at a time, and what is kept for backward is the logits as they are and
// one fp32 number a row.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fedshard::nn {

// The label of a position that does not count.
inline constexpr std::int64_t kMaskedLabel = -100;

// logits [N, V] floating point, labels [N] int64 in [0, V) or kMaskedLabel. Returns a 0-dim fp32 tensor: the sum, not
// the mean, over the unmasked rows (0 where there are none), computed in fp32. Differentiable in logits, whose gradient
// has their dtype. Any other label makes ATen's gather throw (on a CPU) or assert (on a GPU).
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels);

// The same as a plain composition of ATen operations: the reference of the tests.
at::Tensor cross_entropy_sum_reference(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace fedshard::nn
