// Causal self-attention with grouped queries (Ainslie et al., arXiv:2305.13245).
//
// It is ATen's scaled_dot_product_attention, which never holds the [T, T] scores whole. Grouped queries are passed to
// it as they are: on CPUs the copy of keys and values for every head that it saves us costs as much as it brings
// (measured: within 10 % either way), and GPU kernels read the shared heads in place.
//
// Packed rows, which hold several documents, take one call a document instead of a mask: the work is the sum of the
// squares of the lengths, no [T, T] mask is held, and a document's numbers are those that it has alone.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "fedshard/nn/ops/rotary.h"

namespace fedshard::nn {

// query [B, T, heads, D], key and value [B, T, kv_heads, D], heads a multiple of kv_heads, one dtype; query head h
// reads kv head h / (heads / kv_heads). Scores are scaled by 1 / sqrt(D). Returns [B, T, heads, D]. Differentiable in
// all three.
at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

// The attention of a block: query and key rotated (rotate; `tables` for at least the longest document), then
// causal_attention. `documents` are the lengths of the documents, row after row, each within one row: positions restart
// at each one's first token, and none attends to another. Empty: every row is one document. With
// documents, backward keeps the result twice.
at::Tensor document_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const RotaryTables& tables, std::span<const std::int64_t> documents);

// causal_attention with the scores written out: the reference of the tests.
at::Tensor causal_attention_reference(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

}  // namespace fedshard::nn
