// What a model is to the engine: units of parameters (plan/units.h) and, for each stage, a function of tensors. A user
// shards a model of their own by writing these; Llama (nn/llama.h) is one of them.
//
// A stage sees its unit's whole parameters as views into the gathered buffer, in the order of UnitSpec::parameters and
// in the compute dtype. It must not keep them beyond the call, except through autograd, which the engine accounts for.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fedshard/plan/units.h"

namespace fedshard::nn {

// One micro-step's sequences. B rows of T tokens, each row a window of a sequence or packed with several documents.
struct MicroBatch {
  at::Tensor tokens;  // [B, T] int64, inputs
  at::Tensor labels;  // [B, T] int64, the token that follows each input; -100 where the position is masked
  // [B, T] int64 on the CPU: the index of the document that each input belongs to, non-decreasing along a row.
  // Positions restart at a document's first token in the row, and attention stays within the document. Documents end
  // with their row, whatever the index in the next. Undefined: every row is one document.
  at::Tensor documents = {};
};

// From ids [B, T + 1] of any integer type: inputs the first T of each row, labels the last T. Neither shares memory
// with `ids` or with the other, so labels can be masked. With `end_of_text`, documents: one ends with each such token
// among the inputs, which belongs to the document that it ends; what follows it is a label like any other.
MicroBatch micro_batch_of(const at::Tensor& ids, std::optional<std::int64_t> end_of_text = std::nullopt);

// The lengths of the documents, row after row; empty where `documents` is undefined. Throws RunError where they don't
// have the tokens' shape or decrease along a row (a bug of the caller's).
std::vector<std::int64_t> document_lengths(const MicroBatch& batch);

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
