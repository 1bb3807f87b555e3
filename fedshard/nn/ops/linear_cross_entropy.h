// The head's product with its table and the sum of the tokens' cross-entropies, as one operation.
//
// The logits ([tokens, vocabulary]) would be the largest tensor of a step; here they exist for a few rows at a time
// only. The surprising part: the gradients are computed in the forward, while a chunk's logits are at hand. That saves
// computing them again, and costs nothing where the backward of the head follows its forward at once, as the engine's
// does; without gradients (evaluation) none are computed.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fedshard::nn {

// The label of a position that does not count.
inline constexpr std::int64_t kMaskedLabel = -100;

// hidden [N, H] and table [V, H] of one floating dtype, labels [N] int64 in [0, V) or kMaskedLabel. Returns a 0-dim
// fp32 tensor: the sum, not the mean, over the unmasked rows (0 where there are none). The logits are rounded to the
// inputs' dtype, as transformers' are; everything after that is fp32. Masked rows cost nothing and may hold anything,
// infinities included.
//
// Differentiable, once, in hidden and table. At most `chunk_rows` rows (at least 1; model::head_chunk_rows) of logits
// exist at a time, with one fp32 copy where the dtype is not fp32. Until backward it keeps hidden's gradient in its
// dtype, and the table's in fp32, in which it is summed over the chunks and handed out (autograd rounds it if the
// table's grad_dtype is another). Any other label makes ATen's gather throw (on a CPU) or assert (on a GPU).
at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& table, const at::Tensor& labels,
                                    std::int64_t chunk_rows);

// The same as a plain composition of ATen operations: the reference of the tests.
at::Tensor linear_cross_entropy_sum_reference(const at::Tensor& hidden, const at::Tensor& table,
                                              const at::Tensor& labels);

}  // namespace fedshard::nn
