// Reads a Hugging Face config.json to Dims.
//
// What the file asks for and fedshard does not compute (biases, other activations, other kinds of rotary embedding,
// other architectures) is refused by name. A key that Llama's config does not know is ignored, as transformers does:
// config files carry many that say nothing about the computation.
#pragma once
#include <filesystem>
#include <string_view>

#include "fedshard/model/dims.h"

namespace fedshard::model {

// Both spellings of the rotary parameters are read: `rope_parameters` of transformers 5 and the older `rope_theta` with
// `rope_scaling`. Optional keys have transformers' defaults. The result is valid (Dims::validate()).
// Throws UsageError where the file can't be opened or the model is not one that fedshard computes, DamagedError where
// the file is no JSON object or a key has the wrong type or is missing.
Dims read_hf_config(const std::filesystem::path& path);

// The same from text; `source` is what messages call it.
Dims parse_hf_config(std::string_view text, std::string_view source);

}  // namespace fedshard::model
