// One Llama block: attention and feed-forward, each behind a norm and around a residual connection.
//
// It has no state and owns no parameters: they come as views into the gathered unit, in the order of plan::llama_plan.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fedshard/model/dims.h"
#include "fedshard/nn/ops/rotary.h"
#include "fedshard/nn/unit_module.h"

namespace fedshard::nn {

// How a micro-step's blocks run.
struct BlockOptions {
  RotaryTables tables;                  // for at least as many positions as the longest document has tokens
  std::vector<std::int64_t> documents;  // lengths, row after row (document_attention); empty: a row is a document
  bool recompute = false;               // keep the matrix products alone, and make norms and activation again
};

// hidden [B, T, hidden_size] in the compute dtype, the block's 9 parameters in the same; returns hidden's shape and
// dtype. Differentiable in hidden and every parameter; gradients are equal to the bit with and without `recompute`.
at::Tensor block_forward(const model::Dims& dims, Parameters block, const at::Tensor& hidden,
                         const BlockOptions& options);

}  // namespace fedshard::nn
