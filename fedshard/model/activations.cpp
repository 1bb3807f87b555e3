#include "fedshard/model/activations.h"

#include <algorithm>

#include "fedshard/base/error.h"

namespace fedshard::model {
namespace {

constexpr std::int64_t kFp32 = 4, kFp64 = 8, kInt64 = 8;

void check(const MicroStepShape& shape) {
  base::require(shape.batch >= 1 && shape.seq_len >= 1 && shape.element >= 1,
                "activations of {} sequences of {} tokens of {} bytes", shape.batch, shape.seq_len, shape.element);
}

std::int64_t tokens_of(const MicroStepShape& shape) { return shape.batch * shape.seq_len; }

// A stage's output.
std::int64_t boundary_bytes(const Dims& dims, const MicroStepShape& shape) {
  return tokens_of(shape) * dims.hidden_size * shape.element;
}

}  // namespace

std::int64_t block_activation_bytes(const Dims& dims, const MicroStepShape& shape) {
  check(shape);
  if (shape.activation_checkpoint == ActivationCheckpoint::full) return boundary_bytes(dims, shape);
  // In order: the state between attention and feed-forward, and the block's output; query and what attention makes of
  // it; key and value; gate and up.
  std::int64_t elements =
      2 * dims.hidden_size + 2 * dims.query_size() + 2 * dims.key_value_size() + 2 * dims.intermediate_size;
  // Both norms' outputs, and the product of gate and up.
  const std::int64_t cheap = 2 * dims.hidden_size + dims.intermediate_size;
  if (shape.activation_checkpoint == ActivationCheckpoint::none) elements += cheap;
  // What attention makes of each document, beside the whole.
  if (shape.packed) elements += dims.query_size();
  // Two norms' scales, and of attention the logarithm of each row's sum.
  const std::int64_t statistics = 2 + dims.num_attention_heads;
  return tokens_of(shape) * (elements * shape.element + statistics * kFp32);
}

std::int64_t block_working_bytes(const Dims& dims, const MicroStepShape& shape) {
  check(shape);
  const std::int64_t elements = 3 * tokens_of(shape) * dims.intermediate_size;
  return boundary_bytes(dims, shape) + (elements + dims.hidden_size * dims.intermediate_size) * shape.element;
}

std::int64_t head_activation_bytes(const Dims& dims, const MicroStepShape& shape) {
  check(shape);
  const std::int64_t scale = tokens_of(shape) * kFp32;
  const std::int64_t loss = kFp32;
  const std::int64_t table = shape.frozen_head ? 0 : dims.vocab_size * dims.hidden_size * kFp32;
  return boundary_bytes(dims, shape) + table + scale + loss;
}

std::int64_t head_chunk_rows(const Dims& dims) {
  constexpr std::int64_t kBudget = std::int64_t{64} << 20;
  return std::max({kBudget / (dims.vocab_size * kFp32), dims.hidden_size / 8, std::int64_t{1}});
}

std::int64_t head_working_bytes(const Dims& dims, const MicroStepShape& shape) {
  check(shape);
  const std::int64_t rows = std::min(tokens_of(shape), head_chunk_rows(dims));
  // The logits in fp32, and before that in the compute dtype. Their gradient goes where they were.
  const std::int64_t logits = dims.vocab_size * (kFp32 + (shape.element == kFp32 ? 0 : shape.element));
  // Beside them a row's target, its largest logit, the target's, the sum, and what becomes of these in fp32 and fp64.
  const std::int64_t row = logits + kInt64 + 5 * kFp32 + kFp64;
  const std::int64_t places_of_unmasked = tokens_of(shape) * kInt64;
  const std::int64_t sums = 2 * kFp64;
  return boundary_bytes(dims, shape) + rows * row + places_of_unmasked + sums;
}

std::int64_t rotary_table_bytes(const Dims& dims, const MicroStepShape& shape) {
  return 2 * std::min(shape.seq_len, dims.max_position_embeddings) * dims.head_size() * shape.element;
}

std::vector<StageActivations> llama_stage_activations(const Dims& dims, const MicroStepShape& shape) {
  dims.validate();
  check(shape);
  MicroStepShape run = shape;
  if (run.activation_checkpoint == ActivationCheckpoint::full) run.activation_checkpoint = ActivationCheckpoint::none;
  const std::int64_t boundary = boundary_bytes(dims, shape);
  // The embedding's gradient comes as a whole table, and is cast where it is summed in fp32.
  const std::int64_t table =
      dims.vocab_size * dims.hidden_size * (shape.element + (shape.element == kFp32 ? 0 : kFp32));
  std::vector<StageActivations> stages{{boundary, boundary, 0, table}};
  const StageActivations block{boundary, block_activation_bytes(dims, run),
                               tokens_of(shape) * dims.intermediate_size * shape.element,
                               block_working_bytes(dims, run)};
  stages.insert(stages.end(), static_cast<std::size_t>(dims.num_hidden_layers), block);
  stages.push_back({kFp32, head_activation_bytes(dims, shape), head_working_bytes(dims, shape), 2 * boundary});
  return stages;
}

}  // namespace fedshard::model
