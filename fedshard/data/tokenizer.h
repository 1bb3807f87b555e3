// Text to token ids and back: the interface, the byte tokenizer, and the way to load one by name.
// Surprising: a special token's string that occurs in the text (say "<|endoftext|>") becomes that token's id, as in
// `tokenizers.Tokenizer.encode(text, add_special_tokens=False)`; nothing else ever adds a special token.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fedshard::data {

// Every member is safe from any thread; encodings by one object take turns.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // The ids of `text`, without special tokens around it. Any bytes are accepted: bytes that are not valid UTF-8 are
  // encoded byte by byte, apart from the valid text around them, and decode to themselves.
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;

  // The bytes that the ids stand for; a part of a text may begin or end inside a UTF-8 sequence. Special tokens decode
  // to their strings. Throws UsageError for an id that the tokenizer does not have.
  virtual std::string decode(std::span<const std::int32_t> ids) const = 0;

  // One more than the largest id. A model's vocab_size may be larger, not smaller.
  virtual std::int64_t vocab_size() const = 0;

  // The id that follows every document.
  virtual std::int32_t end_of_text() const = 0;

  // 64-bit xxhash of the definition as 16 hex digits. Equal for the same definition in another formatting.
  virtual std::string fingerprint() const = 0;
};

// Ids 0 to 255 are the bytes, 256 is end of text and decodes to "<|end_of_text|>".
class ByteTokenizer final : public Tokenizer {
 public:
  static constexpr std::int32_t kEndOfText = 256;
  std::vector<std::int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const std::int32_t> ids) const override;
  std::int64_t vocab_size() const override { return kEndOfText + 1; }
  std::int32_t end_of_text() const override { return kEndOfText; }
  std::string fingerprint() const override;
};

// `spec` is "byte" or the path of a Hugging Face tokenizer.json (see tokenizer_json.h for what is supported).
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& spec);

// The 64-bit xxhash of `bytes` as 16 hex digits.
std::string hash_hex(std::string_view bytes);

}  // namespace fedshard::data
