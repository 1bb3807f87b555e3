// Rotary position embedding (Su et al., arXiv:2104.09864) with Llama 3's stretching of the frequencies.
//
// Pairing is Hugging Face's: element i of a head turns with element i + D/2, not with its neighbour as in Meta's own
// checkpoints; q and k projections of Hugging Face files are stored for it. Tables are made in fp32 and rounded to the
// compute dtype, and the rotation is done in that dtype: transformers rounds at the same places.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <mutex>
#include <tuple>

#include "fedshard/model/dims.h"

namespace fedshard::nn {

// The D/2 angular frequencies in radians a token, fp32 on the CPU; equal to transformers' to the bit. With `llama3`
// scaling (see model::RopeScaling) long waves are stretched by the factor, short ones kept, those between interpolated.
at::Tensor rotary_frequencies(const model::Dims& dims);

// cos and sin of every angle: [T, D] each, the second half of a row repeating the first.
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
};

// Tables for positions 0..T-1, made once for a device and dtype and handed out as views; a longer T replaces them. Safe
// from several threads (ranks as threads share a model).
class RotaryCache {
 public:
  explicit RotaryCache(const model::Dims& dims);
  // Throws UsageError where T exceeds max_position_embeddings.
  RotaryTables tables(std::int64_t tokens, at::Device device, at::ScalarType dtype) const;

 private:
  using Key = std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType>;
  std::int64_t limit_;
  at::Tensor frequencies_;
  mutable std::mutex mutex_;
  mutable std::map<Key, RotaryTables> made_;
};

// x [B, T, heads, D], tables [T, D] of x's dtype; returns x's shape. Differentiable in x; keeps only the tables.
at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables);

}  // namespace fedshard::nn
