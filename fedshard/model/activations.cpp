#include "fedshard/model/activations.h"

#include "fedshard/base/error.h"

namespace fedshard::model {
namespace {

constexpr std::int64_t kFp32 = 4, kInt64 = 8, kBool = 1;

}  // namespace

std::int64_t block_activation_bytes(const Dims& dims, std::int64_t batch, std::int64_t seq_len, std::int64_t element) {
  // In order: both norms' outputs, the state between attention and feed-forward, and the block's output; query and
  // what attention makes of it; key and value; gate, up and their product.
  const std::int64_t elements =
      4 * dims.hidden_size + 2 * dims.query_size() + 2 * dims.key_value_size() + 3 * dims.intermediate_size;
  // Two norms' scales, and of attention the logarithm of each row's sum.
  const std::int64_t statistics = 2 + dims.num_attention_heads;
  return batch * seq_len * (elements * element + statistics * kFp32);
}

std::int64_t head_activation_bytes(const Dims& dims, std::int64_t batch, std::int64_t seq_len, std::int64_t element) {
  const std::int64_t elements = dims.hidden_size + dims.vocab_size;
  // The norm's scale; for the loss, the logarithm of each row's sum, the target and whether it counts.
  const std::int64_t statistics = kFp32 + kFp32 + kInt64 + kBool;
  const std::int64_t loss = kFp32;
  return batch * seq_len * (elements * element + statistics) + loss;
}

std::int64_t llama_activation_bytes(const Dims& dims, std::int64_t batch, std::int64_t seq_len, std::int64_t element) {
  dims.validate();
  base::require(batch >= 1 && seq_len >= 1 && element >= 1, "activations of {} sequences of {} tokens of {} bytes",
                batch, seq_len, element);
  const std::int64_t embedding = batch * seq_len * dims.hidden_size * element;
  const std::int64_t rotary_tables = 2 * seq_len * dims.head_size() * element;
  return embedding + dims.num_hidden_layers * block_activation_bytes(dims, batch, seq_len, element) +
         head_activation_bytes(dims, batch, seq_len, element) + rotary_tables;
}

}  // namespace fedshard::model
