// Hugging Face's tokenizer.json: byte-level BPE as of GPT-2, Llama 3 and SmolLM2.
// Surprising: a file that asks for anything not listed here is refused by name, however small its effect would be. Only
// `post_processor` is not read: it adds special tokens to whole sequences, which encode() never does.
//
// Supported: model BPE with merges as "a b" or [a, b] and `ignore_merges`; pre-tokenizers ByteLevel (`use_regex`,
// `add_prefix_space`), Split (Regex or String, Isolated), Digits and Sequence, with ByteLevel last; added tokens,
// special or not, matched in the text leftmost and longest, first those with normalized = false. All 256 bytes must be
// tokens. End of text is the first of <|end_of_text|>, <|endoftext|>, </s> that the file has. The oracle is the
// `tokenizers` package 0.23 (tests/parity/test_tokenizer.py); it takes no invalid UTF-8, see Tokenizer::encode for what
// happens to that here.
#pragma once
#include <filesystem>
#include <memory>

#include "fedshard/data/tokenizer.h"

namespace fedshard::data {

// Throws UsageError where the file is missing or asks for what is not supported, DamagedError where it is malformed;
// both name the file.
std::unique_ptr<Tokenizer> load_tokenizer_json(const std::filesystem::path& path);

}  // namespace fedshard::data
