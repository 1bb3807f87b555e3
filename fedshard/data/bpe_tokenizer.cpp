#include "fedshard/data/bpe_tokenizer.h"

#include <algorithm>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::data {

void StringFinder::add(std::string text, std::int32_t id) {
  base::require(!text.empty(), "an added token without a text");
  std::vector<Entry>& entries = by_first_byte_[static_cast<unsigned char>(text[0])];
  const auto place =
      std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) { return entry.text.size() < text.size(); });
  entries.insert(place, {std::move(text), id});
  any_ = true;
}

const StringFinder::Entry* StringFinder::at_start_of(std::string_view text) const {
  for (const Entry& entry : by_first_byte_[static_cast<unsigned char>(text[0])]) {
    if (text.starts_with(entry.text)) return &entry;
  }
  return nullptr;
}

BpeTokenizer::BpeTokenizer(TokenizerDefinition definition)
    : definition_(std::move(definition)), bpe_(std::move(definition_.bpe)) {}

std::vector<std::int32_t> BpeTokenizer::encode(std::string_view text) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::int32_t> ids;
  const auto found = [&](std::int32_t id) { ids.push_back(id); };
  const auto plain = [&](std::string_view part) {
    definition_.pre_tokenizer.split(part, [&](std::string_view piece) { bpe_.append(piece, ids); });
  };
  definition_.added_first.split(text, found,
                                [&](std::string_view part) { definition_.added_second.split(part, found, plain); });
  return ids;
}

std::string BpeTokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string text;
  for (const std::int32_t id : ids) {
    const auto bytes = definition_.bytes_of_id.find(id);
    if (bytes == definition_.bytes_of_id.end()) {
      base::fail<base::UsageError>("token id {} is not one of the tokenizer's {} ids", id,
                                   definition_.bytes_of_id.size());
    }
    text += bytes->second;
  }
  return text;
}

}  // namespace fedshard::data
