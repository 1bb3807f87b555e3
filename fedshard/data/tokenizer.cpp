#include "fedshard/data/tokenizer.h"

#include <xxhash.h>

#include "fedshard/base/error.h"
#include "fedshard/data/tokenizer_json.h"

namespace fedshard::data {

std::string hash_hex(std::string_view bytes) { return fmt::format("{:016x}", XXH64(bytes.data(), bytes.size(), 0)); }

std::vector<std::int32_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) ids[i] = static_cast<unsigned char>(text[i]);
  return ids;
}

std::string ByteTokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  text.reserve(ids.size());
  for (const std::int32_t id : ids) {
    if (id < 0 || id > kEndOfText) {
      base::fail<base::UsageError>("token id {} is not one of the byte tokenizer's (0 to {})", id, kEndOfText);
    }
    if (id == kEndOfText) {
      text += "<|end_of_text|>";
    } else {
      text += static_cast<char>(id);
    }
  }
  return text;
}

std::string ByteTokenizer::fingerprint() const { return hash_hex("fedshard byte tokenizer: 0..255 bytes, 256 end"); }

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& spec) {
  if (spec == "byte") return std::make_unique<ByteTokenizer>();
  return load_tokenizer_json(spec);
}

}  // namespace fedshard::data
