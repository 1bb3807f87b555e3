// What a model is to the engine: units of parameters (plan/units.h) and, for each stage, a function of tensors. A user
// shards a model of their own by writing these; Llama (nn/llama.h) is one of them.
//
// A stage sees its unit's whole parameters as views into the gathered buffer, in the order of UnitSpec::parameters and
// in the compute dtype. It must not keep them beyond the call, except through autograd, which the engine accounts for.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fedshard/plan/units.h"

namespace fedshard::nn {

// One micro-step's sequences. B sequences of T tokens.
struct MicroBatch {
  at::Tensor tokens;  // [B, T] int64, inputs
  at::Tensor labels;  // [B, T] int64, the token that follows each input; -100 where the position is masked
};

// From ids [B, T + 1] of any integer type: inputs the first T of each row, labels the last T. Neither shares memory
// with `ids` or with the other, so labels can be masked.
MicroBatch micro_batch_of(const at::Tensor& ids);

using Parameters = std::span<const at::Tensor>;

// The first stage gets an undefined input and reads batch.tokens; each other stage gets its predecessor's output; the
// last one returns the sum (not the mean) over the unmasked positions of the cross-entropy, a 0-dim fp32 tensor.
using StageFunction =
    std::function<at::Tensor(Parameters parameters, const at::Tensor& input, const MicroBatch& batch)>;

struct Model {
  plan::ModelPlan plan;
  std::vector<StageFunction> stages;  // one for each of plan.stages
};

}  // namespace fedshard::nn
