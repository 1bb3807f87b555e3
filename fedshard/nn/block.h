// One Llama block: attention and feed-forward, each behind a norm and around a residual connection.
//
// It has no state and owns no parameters: they come as views into the gathered unit, in the order of plan::llama_plan.
#pragma once
#include <ATen/core/Tensor.h>

#include "fedshard/model/dims.h"
#include "fedshard/nn/ops/rotary.h"
#include "fedshard/nn/unit_module.h"

namespace fedshard::nn {

// hidden [B, T, hidden_size] in the compute dtype, the block's 9 parameters in the same; returns hidden's shape and
// dtype. Differentiable in hidden and every parameter.
at::Tensor block_forward(const model::Dims& dims, Parameters block, const at::Tensor& hidden,
                         const RotaryTables& tables);

}  // namespace fedshard::nn
