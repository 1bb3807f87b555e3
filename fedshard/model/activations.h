// The bytes that a Llama keeps between forward and backward, in closed form.
//
// They follow from what the operations of nn/ops really save, so this file changes when one of those does; a test
// measures the two against each other. The surprising part is what is missing: no scores of the attention (its kernel
// keeps one number a row), no rotated copies beside the queries and keys themselves, no fp32 copy of the logits.
#pragma once
#include <cstdint>

#include "fedshard/model/dims.h"

namespace fedshard::model {

// All in bytes, for `batch` sequences of `seq_len` tokens and a compute dtype of `element` bytes (4: fp32, 2: bf16).
// Statistics are fp32 and token ids int64 whatever the compute dtype. Without activation checkpointing.

// Of one block: what its autograd graph saves, the output that it hands on included, its input (the output before) not.
std::int64_t block_activation_bytes(const Dims& dims, std::int64_t batch, std::int64_t seq_len, std::int64_t element);

// Of the head: the normed hidden states, the logits in the compute dtype, a few numbers a token, and the loss.
std::int64_t head_activation_bytes(const Dims& dims, std::int64_t batch, std::int64_t seq_len, std::int64_t element);

// Of one micro-step, at its fullest (the forward is over, the backward yet to begin): the embedding's output, all
// blocks, the head, and the rotary tables, which all blocks share. The micro-batch itself and the memory in which
// an operation works (of the head's backward: a gradient as large as the logits) are not counted.
// Throws UsageError where the dims are not valid, RunError where a size is below 1 (a bug of the caller's).
std::int64_t llama_activation_bytes(const Dims& dims, std::int64_t batch, std::int64_t seq_len, std::int64_t element);

}  // namespace fedshard::model
