// The sizes of a Llama-class model: what a config.json or a preset fixes, and what follows from it (parameters, FLOPs).
//
// Names are Hugging Face's, so that any key of its Llama config means the same here. The surprising decision:
// `head_dim` stays 0 ("hidden_size / num_attention_heads") until somebody sets it, so that a preset whose hidden_size
// is overridden keeps consistent heads; use head_size(), which resolves it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fedshard::model {

// Llama 3's stretching of the rotary frequencies (rope_type "llama3"; Llama 3 paper, arXiv:2407.21783, and the
// reference code of llama-models). All four values are required by it.
struct RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_max_position_embeddings = 8192;
  bool operator==(const RopeScaling&) const = default;
};

struct Dims {
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  std::int64_t vocab_size = 0;
  double rope_theta = 10000.0;
  std::optional<RopeScaling> rope_scaling;
  double rms_norm_eps = 1e-5;
  bool tie_word_embeddings = false;
  std::int64_t max_position_embeddings = 2048;
  double initializer_range = 0.02;
  bool operator==(const Dims&) const = default;

  // Throws UsageError, naming the key and both numbers, where the sizes do not fit together.
  void validate() const;

  // The elements of one head; valid after validate().
  std::int64_t head_size() const { return head_dim > 0 ? head_dim : hidden_size / num_attention_heads; }
  std::int64_t query_size() const { return num_attention_heads * head_size(); }      // rows of q_proj
  std::int64_t key_value_size() const { return num_key_value_heads * head_size(); }  // rows of k_proj and v_proj

  // All parameters, each counted once (a tied head adds none).
  std::int64_t parameter_count() const;

  // Parameters that multiply activations in a matrix product: everything but norms and the embedding's table look-up.
  // The head's matrix counts, tied or not.
  std::int64_t matmul_parameter_count() const;

  // Floating-point operations of one token of a sequence of `seq_len` tokens: 2 per matmul parameter, and
  // 4 * layers * query_size * seq_len for the attention's two products. As in the PaLM paper's definition of model
  // FLOPs utilisation (arXiv:2204.02311, appendix B), the causal mask is not discounted.
  double forward_flops_per_token(std::int64_t seq_len) const;

  // Forward and backward: three times the forward, 6 * matmul parameters + 12 * layers * query_size * seq_len (the same
  // source). Recomputation is not counted.
  double training_flops_per_token(std::int64_t seq_len) const;
};

// The names that preset() knows, smallest first.
std::vector<std::string> preset_names();

// A named model: "llama-tiny" (0.47M parameters, for the byte tokenizer), "llama-60m" (the 60M model of the GaLore
// paper, arXiv:2403.03507), "llama3.2-1b", "llama3.1-8b", "llama3.1-70b" (the released models). Throws UsageError
// listing the names for any other.
Dims preset(std::string_view name);

}  // namespace fedshard::model
