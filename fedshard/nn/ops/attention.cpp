#include "fedshard/nn/ops/attention.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <cmath>
#include <limits>
#include <vector>

namespace fedshard::nn {
namespace {

// Rows of one length, one document each.
at::Tensor rotated_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const RotaryTables& tables) {
  const RotaryTables here{tables.cos.narrow(0, 0, query.size(1)), tables.sin.narrow(0, 0, query.size(1))};
  return causal_attention(rotate(query, here), rotate(key, here), value);
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const bool grouped = query.size(2) != key.size(2);
  return at::scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                                          /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true, /*scale=*/{},
                                          grouped)
      .transpose(1, 2);
}

at::Tensor document_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const RotaryTables& tables, std::span<const std::int64_t> documents) {
  if (documents.empty()) return rotated_attention(query, key, value, tables);
  // A split's gradient is one concatenation, while each slice's would be a whole tensor of zeros around its part.
  const auto parts_of = [&](const at::Tensor& x) {
    return x.reshape({1, -1, x.size(2), x.size(3)})
        .split_with_sizes(at::IntArrayRef(documents.data(), documents.size()), 1);
  };
  const std::vector<at::Tensor> queries = parts_of(query), keys = parts_of(key), values = parts_of(value);
  std::vector<at::Tensor> results;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    results.push_back(rotated_attention(queries[i], keys[i], values[i], tables));
  }
  return at::cat(results, 1).view(query.sizes());
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
