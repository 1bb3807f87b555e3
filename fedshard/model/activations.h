// The bytes of activations that a Llama's micro-step takes, in closed form.
//
// They follow from what the operations of nn/ops really save, so this file changes when one of those does; a test
// measures the two against each other. The surprising part is what is missing: no scores of the attention (its kernel
// keeps one number a row), no rotated copies beside the queries and keys themselves, and no logits but a chunk's.
#pragma once
#include <cstdint>
#include <vector>

#include "fedshard/model/dims.h"

namespace fedshard::model {

// What backward finds and what it computes again.
enum class ActivationCheckpoint {
  none,       // keep what the operations save
  selective,  // keep the products of matrices and of attention; make norms and the gated activation again
  full,       // keep each block's input; run its forward again before its backward
};

// `batch` rows of `seq_len` tokens in a compute dtype of `element` bytes (4: fp32, 2: bf16).
struct MicroStepShape {
  std::int64_t batch = 1;
  std::int64_t seq_len = 1;
  std::int64_t element = 4;
  ActivationCheckpoint activation_checkpoint = ActivationCheckpoint::none;
  bool packed = false;       // rows hold documents (nn::MicroBatch::documents)
  bool frozen_head = false;  // the head's table needs no gradient
};

// All in bytes. Statistics are fp32 whatever the compute dtype.

// Of one block: what its autograd graph saves, the output that it hands on included, its input (the output before) not.
// With `full`, that is the output alone.
std::int64_t block_activation_bytes(const Dims& dims, const MicroStepShape& shape);

// What a block's backward takes beyond that where it takes most: the gradient of its output, and in the gated
// activation three gradients as wide as the feed-forward and that of a matrix.
std::int64_t block_working_bytes(const Dims& dims, const MicroStepShape& shape);

// Of the head between its forward and its backward: the gradients of the normed hidden states (compute dtype) and of
// the table (fp32; unless it is frozen), which its forward computes; the norm's statistics and the loss.
std::int64_t head_activation_bytes(const Dims& dims, const MicroStepShape& shape);

// Rows of logits that exist at once: as many as fit 64 MiB in fp32, but no fewer than hidden_size / 8. Each chunk
// passes over the whole table and its gradient, which would cost more than the products if chunks were smaller; so for
// large models a chunk of fp32 logits takes an eighth of the table's gradient.
std::int64_t head_chunk_rows(const Dims& dims);

// What the head's forward takes beyond head_activation_bytes while it computes: the normed hidden states and one
// chunk's logits. Not counted: where rows are masked, a copy of one chunk's hidden states.
std::int64_t head_working_bytes(const Dims& dims, const MicroStepShape& shape);

// Of one stage of a micro-step. Which of them live at the same time is the schedule's affair (plan/memory.h).
struct StageActivations {
  std::int64_t output = 0;    // what it hands on
  std::int64_t kept = 0;      // from its forward to its backward, the output included
  std::int64_t forward = 0;   // beyond that, while its forward computes
  std::int64_t backward = 0;  // beyond that, while its backward computes
};

// Of every stage of plan::llama_plan. With `full`, `kept` is what a block keeps when it is run again.
// Throws UsageError where the dims are not valid, RunError where a size is below 1 (a bug of the caller's).
std::vector<StageActivations> llama_stage_activations(const Dims& dims, const MicroStepShape& shape);

// What all blocks share.
std::int64_t rotary_table_bytes(const Dims& dims, const MicroStepShape& shape);

}  // namespace fedshard::model
