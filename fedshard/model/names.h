// Hugging Face's names of a Llama's parameters: the names that plans, checkpoints, `include` patterns and messages use.
// The names are the model's, not a file format's: nothing here depends on safetensors.
#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace fedshard::model {

inline constexpr std::string_view kEmbedTokens = "model.embed_tokens.weight";
inline constexpr std::string_view kFinalNorm = "model.norm.weight";
inline constexpr std::string_view kLmHead = "lm_head.weight";

// The parameters of one block, in the order in which a block uses them.
inline constexpr std::string_view kInputNorm = "input_layernorm";
inline constexpr std::string_view kQueryProjection = "self_attn.q_proj";
inline constexpr std::string_view kKeyProjection = "self_attn.k_proj";
inline constexpr std::string_view kValueProjection = "self_attn.v_proj";
inline constexpr std::string_view kOutputProjection = "self_attn.o_proj";
inline constexpr std::string_view kPostAttentionNorm = "post_attention_layernorm";
inline constexpr std::string_view kGateProjection = "mlp.gate_proj";
inline constexpr std::string_view kUpProjection = "mlp.up_proj";
inline constexpr std::string_view kDownProjection = "mlp.down_proj";

// "model.layers.3.mlp.up_proj.weight"
inline std::string block_parameter(std::int64_t layer, std::string_view module) {
  return fmt::format("model.layers.{}.{}.weight", layer, module);
}

// Rotary frequencies that old versions of transformers saved as buffers. They follow from the config.
inline bool is_rotary_buffer(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

}  // namespace fedshard::model
