// The tokenizer that a tokenizer.json defines: added tokens are cut out of the text, the rest is cut into pieces, each
// piece is merged.
// Surprising: added tokens are looked for in two passes over the whole text, as the package does, so one that is
// matched in the first pass can split what would have been a longer one of the second.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "fedshard/data/bpe.h"
#include "fedshard/data/pretokenizer.h"
#include "fedshard/data/tokenizer.h"

namespace fedshard::data {

// Finds fixed strings in a text: leftmost, of those that begin there the longest.
class StringFinder {
 public:
  void add(std::string text, std::int32_t id);

  // Calls `found(id)` for each match and `between(std::string_view)` for each stretch around them, in order.
  template <class Found, class Between>
  void split(std::string_view text, const Found& found, const Between& between) const {
    std::size_t done = 0;
    for (std::size_t at = 0; any_ && at < text.size();) {
      const Entry* const match = at_start_of(text.substr(at));
      if (match == nullptr) {
        ++at;
        continue;
      }
      if (at > done) between(text.substr(done, at - done));
      found(match->id);
      done = at += match->text.size();
    }
    if (done < text.size()) between(text.substr(done));
  }

 private:
  struct Entry {
    std::string text;
    std::int32_t id;
  };
  const Entry* at_start_of(std::string_view text) const;

  std::array<std::vector<Entry>, 256> by_first_byte_;  // longest first
  bool any_ = false;
};

struct TokenizerDefinition {
  BpeDefinition bpe;
  PreTokenizer pre_tokenizer;
  StringFinder added_first;   // added tokens with normalized = false
  StringFinder added_second;  // the others
  std::unordered_map<std::int32_t, std::string> bytes_of_id;
  std::int64_t vocab_size = 0;
  std::int32_t end_of_text = 0;
  std::string fingerprint;
};

class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(TokenizerDefinition definition);
  std::vector<std::int32_t> encode(std::string_view text) const override;
  std::string decode(std::span<const std::int32_t> ids) const override;
  std::int64_t vocab_size() const override { return definition_.vocab_size; }
  std::int32_t end_of_text() const override { return definition_.end_of_text; }
  std::string fingerprint() const override { return definition_.fingerprint; }

 private:
  TokenizerDefinition definition_;
  mutable std::mutex mutex_;  // guards bpe_ and the patterns of the pre-tokenizer
  mutable Bpe bpe_;
};

}  // namespace fedshard::data
