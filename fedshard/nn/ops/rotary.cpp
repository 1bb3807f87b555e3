#include "fedshard/nn/ops/rotary.h"

#include <algorithm>
#include <numbers>

#include "fedshard/base/error.h"

namespace fedshard::nn {
namespace {

// Every operation below is fp32 and in this order on purpose: another order changes the last bit of a frequency, and a
// frequency is multiplied by positions of up to 131,072.
at::Tensor stretched(const at::Tensor& frequencies, const model::RopeScaling& scaling) {
  const auto context = static_cast<double>(scaling.original_max_position_embeddings);
  const double longest = context / scaling.low_freq_factor;
  const double shortest = context / scaling.high_freq_factor;
  const at::Tensor wavelength = (2 * std::numbers::pi) / frequencies;
  const at::Tensor by_length = at::where(wavelength > longest, frequencies / scaling.factor, frequencies);
  const at::Tensor smooth =
      (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  const at::Tensor between = (1 - smooth) * by_length / scaling.factor + smooth * by_length;
  const at::Tensor is_between = (wavelength >= shortest).logical_and(wavelength <= longest);
  return at::where(is_between, between, by_length);
}

}  // namespace

at::Tensor rotary_frequencies(const model::Dims& dims) {
  const at::NoGradGuard no_grad;
  const std::int64_t size = dims.head_size();
  const at::Tensor exponent = at::arange(0, size, 2, at::kFloat) / size;
  const at::Tensor frequencies = 1.0 / at::pow(at::Scalar(dims.rope_theta), exponent);
  return dims.rope_scaling ? stretched(frequencies, *dims.rope_scaling) : frequencies;
}

RotaryCache::RotaryCache(const model::Dims& dims)
    : limit_(dims.max_position_embeddings), frequencies_(rotary_frequencies(dims)) {}

RotaryTables RotaryCache::tables(std::int64_t tokens, at::Device device, at::ScalarType dtype) const {
  if (tokens > limit_) {
    base::fail<base::UsageError>(
        "a sequence of {} tokens is longer than the model's max_position_embeddings of {}; shorten it, or raise "
        "max_position_embeddings",
        tokens, limit_);
  }
  const std::lock_guard lock(mutex_);
  RotaryTables& tables = made_[Key{device.type(), device.index(), dtype}];
  const std::int64_t have = tables.cos.defined() ? tables.cos.size(0) : 0;
  if (have < tokens) {
    const at::NoGradGuard no_grad;
    // Doubling, so that sequences that grow by one token (generation) do not make a table each.
    const std::int64_t rows = std::min(limit_, std::max(tokens, 2 * have));
    const at::Tensor angles = at::arange(rows, at::kFloat).unsqueeze(1) * frequencies_;
    const at::Tensor both = at::cat({angles, angles}, 1);
    tables = {both.cos().to(device, dtype), both.sin().to(device, dtype)};
  }
  return {tables.cos.narrow(0, 0, tokens), tables.sin.narrow(0, 0, tokens)};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables) {
  const std::int64_t half = x.size(-1) / 2;
  const at::Tensor turned = at::cat({x.narrow(-1, half, half).neg(), x.narrow(-1, 0, half)}, -1);
  return x * tables.cos.unsqueeze(1) + turned * tables.sin.unsqueeze(1);
}

}  // namespace fedshard::nn
