#include "fedshard/nn/block.h"

#include <ATen/ops/linear.h>

#include "fedshard/base/error.h"
#include "fedshard/nn/ops/attention.h"
#include "fedshard/nn/ops/norm_linears.h"
#include "fedshard/nn/ops/swiglu_linear.h"

namespace fedshard::nn {
namespace {

// The places of a block's parameters in its unit (plan/llama_units.h).
enum BlockParameter { kInputNorm, kQuery, kKey, kValue, kOutput, kPostAttentionNorm, kGate, kUp, kDown, kCount };

at::Tensor attention(const model::Dims& dims, Parameters block, const at::Tensor& hidden, const BlockOptions& options) {
  const std::vector<at::Tensor> projected = norm_linears(
      hidden, block[kInputNorm], dims.rms_norm_eps, {block[kQuery], block[kKey], block[kValue]}, options.recompute);
  const auto heads_of = [&](int i, std::int64_t heads) {
    return projected[i].view({hidden.size(0), hidden.size(1), heads, dims.head_size()});
  };
  const at::Tensor mixed =
      document_attention(heads_of(0, dims.num_attention_heads), heads_of(1, dims.num_key_value_heads),
                         heads_of(2, dims.num_key_value_heads), options.tables, options.documents);
  return at::linear(mixed.reshape({hidden.size(0), hidden.size(1), dims.query_size()}), block[kOutput]);
}

}  // namespace

at::Tensor block_forward(const model::Dims& dims, Parameters block, const at::Tensor& hidden,
                         const BlockOptions& options) {
  base::require(block.size() == kCount, "a block has {} parameters, not {}", static_cast<int>(kCount), block.size());
  const at::Tensor middle = hidden + attention(dims, block, hidden, options);
  const std::vector<at::Tensor> wide =
      norm_linears(middle, block[kPostAttentionNorm], dims.rms_norm_eps, {block[kGate], block[kUp]}, options.recompute);
  return middle + swiglu_linear(wide[0], wide[1], block[kDown], options.recompute);
}

}  // namespace fedshard::nn
