#include "fedshard/nn/block.h"

#include <ATen/ops/linear.h>

#include "fedshard/base/error.h"
#include "fedshard/nn/ops/attention.h"
#include "fedshard/nn/ops/rms_norm.h"
#include "fedshard/nn/ops/swiglu.h"

namespace fedshard::nn {
namespace {

// The places of a block's parameters in its unit (plan/llama_units.h).
enum BlockParameter { kInputNorm, kQuery, kKey, kValue, kOutput, kPostAttentionNorm, kGate, kUp, kDown, kCount };

at::Tensor attention(const model::Dims& dims, Parameters block, const at::Tensor& normal, const RotaryTables& tables) {
  const std::int64_t batch = normal.size(0);
  const std::int64_t tokens = normal.size(1);
  const auto heads_of = [&](BlockParameter weight, std::int64_t heads) {
    return at::linear(normal, block[weight]).view({batch, tokens, heads, dims.head_size()});
  };
  const at::Tensor query = rotate(heads_of(kQuery, dims.num_attention_heads), tables);
  const at::Tensor key = rotate(heads_of(kKey, dims.num_key_value_heads), tables);
  const at::Tensor value = heads_of(kValue, dims.num_key_value_heads);
  const at::Tensor mixed = causal_attention(query, key, value).reshape({batch, tokens, dims.query_size()});
  return at::linear(mixed, block[kOutput]);
}

}  // namespace

at::Tensor block_forward(const model::Dims& dims, Parameters block, const at::Tensor& hidden,
                         const RotaryTables& tables) {
  base::require(block.size() == kCount, "a block has {} parameters, not {}", static_cast<int>(kCount), block.size());
  const at::Tensor normal = rms_norm(hidden, block[kInputNorm], dims.rms_norm_eps);
  const at::Tensor middle = hidden + attention(dims, block, normal, tables);
  const at::Tensor feed = rms_norm(middle, block[kPostAttentionNorm], dims.rms_norm_eps);
  const at::Tensor active = swiglu(at::linear(feed, block[kGate]), at::linear(feed, block[kUp]));
  return middle + at::linear(active, block[kDown]);
}

}  // namespace fedshard::nn
