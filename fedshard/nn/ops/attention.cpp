#include "fedshard/nn/ops/attention.h"

#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <limits>

namespace fedshard::nn {

at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const bool grouped = query.size(2) != key.size(2);
  return at::scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                                          /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true, /*scale=*/{},
                                          grouped)
      .transpose(1, 2);
}

at::Tensor causal_attention_reference(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const std::int64_t tokens = query.size(1);
  const std::int64_t copies = query.size(2) / key.size(2);
  const at::Tensor q = query.transpose(1, 2);
  const at::Tensor k = key.transpose(1, 2).repeat_interleave(copies, 1);
  const at::Tensor v = value.transpose(1, 2).repeat_interleave(copies, 1);
  const at::Tensor future = at::ones({tokens, tokens}, query.options().dtype(at::kBool)).triu(1);
  const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(query.size(3)));
  const at::Tensor masked = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  return at::matmul(at::softmax(masked, -1, at::kFloat).to(query.scalar_type()), v).transpose(1, 2);
}

}  // namespace fedshard::nn
