// Causal self-attention with grouped queries (Ainslie et al., arXiv:2305.13245).
//
// It is ATen's scaled_dot_product_attention, which never holds the [T, T] scores whole. Grouped queries are passed to
// it as they are: on CPUs the copy of keys and values for every head that it saves us costs as much as it brings
// (measured: within 10 % either way), and GPU kernels read the shared heads in place.
#pragma once
#include <ATen/core/Tensor.h>

namespace fedshard::nn {

// query [B, T, heads, D], key and value [B, T, kv_heads, D], heads a multiple of kv_heads, one dtype; query head h
// reads kv head h / (heads / kv_heads). Scores are scaled by 1 / sqrt(D). Returns [B, T, heads, D]. Differentiable in
// all three.
at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

// The same with the scores written out: the reference of the tests.
at::Tensor causal_attention_reference(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

}  // namespace fedshard::nn
