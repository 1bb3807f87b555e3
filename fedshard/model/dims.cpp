#include "fedshard/model/dims.h"

#include <fmt/ranges.h>

#include <cmath>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::model {

using base::fail;
using base::UsageError;

namespace {

// Far above any model. The first keeps products of two sizes within 64 bits, the last the totals and what a step of
// thousands of ranks sends of them; each block is a unit of its own, and many of them take long only to plan.
constexpr std::int64_t kLargestSize = std::int64_t{1} << 28;
constexpr std::int64_t kMostBlocks = std::int64_t{1} << 16;
constexpr std::int64_t kMostParameters = std::int64_t{1} << 44;

void require_positive(const char* key, double value) {
  if (!(value > 0) || !std::isfinite(value)) fail<UsageError>("model: {} is {}; it must be positive", key, value);
}

void validate_sizes(const Dims& dims) {
  const std::pair<const char*, std::int64_t> sizes[] = {{"hidden_size", dims.hidden_size},
                                                        {"intermediate_size", dims.intermediate_size},
                                                        {"num_hidden_layers", dims.num_hidden_layers},
                                                        {"num_attention_heads", dims.num_attention_heads},
                                                        {"num_key_value_heads", dims.num_key_value_heads},
                                                        {"vocab_size", dims.vocab_size},
                                                        {"max_position_embeddings", dims.max_position_embeddings}};
  for (const auto& [key, value] : sizes) {
    if (value < 1) fail<UsageError>("model: {} is {}; it must be at least 1", key, value);
    if (value > kLargestSize) fail<UsageError>("model: {} is {}; it must be at most {}", key, value, kLargestSize);
  }
  if (dims.num_hidden_layers > kMostBlocks) {
    fail<UsageError>("model: num_hidden_layers is {}; it must be at most {}", dims.num_hidden_layers, kMostBlocks);
  }
  if (dims.head_dim < 0 || dims.head_dim > kLargestSize) {
    fail<UsageError>("model: head_dim is {}; it must be between 1 and {}, or 0 for hidden_size / num_attention_heads",
                     dims.head_dim, kLargestSize);
  }
}

void validate_heads(const Dims& dims) {
  if (dims.head_dim == 0 && dims.hidden_size % dims.num_attention_heads != 0) {
    fail<UsageError>("model: hidden_size {} can't be divided by num_attention_heads {}; change one, or set head_dim",
                     dims.hidden_size, dims.num_attention_heads);
  }
  if (dims.num_attention_heads % dims.num_key_value_heads != 0) {
    fail<UsageError>("model: num_attention_heads {} can't be divided by num_key_value_heads {}",
                     dims.num_attention_heads, dims.num_key_value_heads);
  }
  if (dims.head_size() % 2 != 0) {
    fail<UsageError>("model: rotary embedding needs an even head_dim, not {} (hidden_size {}, num_attention_heads {})",
                     dims.head_size(), dims.hidden_size, dims.num_attention_heads);
  }
}

// In floating point, where no product overflows.
void validate_total(const Dims& dims) {
  const auto hidden = static_cast<double>(dims.hidden_size);
  const auto projections = static_cast<double>(dims.query_size() + dims.key_value_size());
  const double block = 2 * hidden * projections + 3 * hidden * static_cast<double>(dims.intermediate_size);
  const double total =
      static_cast<double>(dims.num_hidden_layers) * block + 2 * hidden * static_cast<double>(dims.vocab_size);
  if (total > static_cast<double>(kMostParameters)) {
    fail<UsageError>("model: its sizes make {:.2g} parameters; there must be at most {:.2g}", total,
                     static_cast<double>(kMostParameters));
  }
}

void validate_rope_scaling(const RopeScaling& scaling) {
  require_positive("rope_scaling.factor", scaling.factor);
  require_positive("rope_scaling.low_freq_factor", scaling.low_freq_factor);
  require_positive("rope_scaling.high_freq_factor", scaling.high_freq_factor);
  if (scaling.factor < 1) fail<UsageError>("model: rope_scaling.factor is {}; it must be at least 1", scaling.factor);
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    fail<UsageError>("model: rope_scaling.high_freq_factor {} must be above rope_scaling.low_freq_factor {}",
                     scaling.high_freq_factor, scaling.low_freq_factor);
  }
  if (scaling.original_max_position_embeddings < 1) {
    fail<UsageError>("model: rope_scaling.original_max_position_embeddings is {}; it must be at least 1",
                     scaling.original_max_position_embeddings);
  }
}

Dims llama3(std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads) {
  Dims dims;
  dims.hidden_size = hidden;
  dims.intermediate_size = intermediate;
  dims.num_hidden_layers = layers;
  dims.num_attention_heads = heads;
  dims.num_key_value_heads = 8;
  dims.vocab_size = 128256;
  dims.rope_theta = 500000.0;
  dims.rope_scaling = RopeScaling{};
  dims.max_position_embeddings = 131072;
  return dims;
}

Dims llama32_1b() {
  Dims dims = llama3(2048, 8192, 16, 32);
  dims.rope_scaling->factor = 32.0;
  dims.tie_word_embeddings = true;
  return dims;
}

Dims llama_tiny() {
  Dims dims;
  dims.hidden_size = 96;
  dims.intermediate_size = 256;
  dims.num_hidden_layers = 4;
  dims.num_attention_heads = 4;
  dims.num_key_value_heads = 2;
  dims.vocab_size = 320;
  return dims;
}

Dims llama_60m() {
  Dims dims;
  dims.hidden_size = 512;
  dims.intermediate_size = 1376;
  dims.num_hidden_layers = 8;
  dims.num_attention_heads = 8;
  dims.num_key_value_heads = 8;
  dims.vocab_size = 32000;
  return dims;
}

struct Preset {
  const char* name;
  Dims dims;
};

std::vector<Preset> presets() {
  return {{"llama-tiny", llama_tiny()},
          {"llama-60m", llama_60m()},
          {"llama3.2-1b", llama32_1b()},
          {"llama3.1-8b", llama3(4096, 14336, 32, 32)},
          {"llama3.1-70b", llama3(8192, 28672, 80, 64)}};
}

std::int64_t matmul_parameters_of_a_block(const Dims& dims) {
  const std::int64_t attention = 2 * dims.hidden_size * (dims.query_size() + dims.key_value_size());
  return attention + 3 * dims.hidden_size * dims.intermediate_size;
}

}  // namespace

void Dims::validate() const {
  validate_sizes(*this);
  validate_heads(*this);
  validate_total(*this);
  require_positive("rope_theta", rope_theta);
  require_positive("rms_norm_eps", rms_norm_eps);
  if (!(initializer_range >= 0) || !std::isfinite(initializer_range)) {
    fail<UsageError>("model: initializer_range is {}; it must not be negative", initializer_range);
  }
  if (rope_scaling) validate_rope_scaling(*rope_scaling);
}

std::int64_t Dims::parameter_count() const {
  const std::int64_t tables = (tie_word_embeddings ? 1 : 2) * vocab_size * hidden_size;
  const std::int64_t norms = (2 * num_hidden_layers + 1) * hidden_size;
  return tables + norms + num_hidden_layers * matmul_parameters_of_a_block(*this);
}

std::int64_t Dims::matmul_parameter_count() const {
  return num_hidden_layers * matmul_parameters_of_a_block(*this) + vocab_size * hidden_size;
}

double Dims::forward_flops_per_token(std::int64_t seq_len) const {
  const double attention =
      4.0 * static_cast<double>(num_hidden_layers) * static_cast<double>(query_size()) * static_cast<double>(seq_len);
  return 2.0 * static_cast<double>(matmul_parameter_count()) + attention;
}

double Dims::training_flops_per_token(std::int64_t seq_len) const { return 3.0 * forward_flops_per_token(seq_len); }

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  return names;
}

Dims preset(std::string_view name) {
  for (const Preset& preset : presets()) {
    if (name == preset.name) return preset.dims;
  }
  fail<UsageError>("there is no model preset '{}'; the presets are {}", name, fmt::join(preset_names(), ", "));
}

}  // namespace fedshard::model
