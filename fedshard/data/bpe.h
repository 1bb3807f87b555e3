// Byte pair encoding of one piece of text: start from its bytes, merge the neighbours whose pair is earliest in the
// merge list (of equals the leftmost), until no pair of neighbours is in the list.
// Surprising: everything is in raw bytes; the printable characters by which tokenizer files write bytes are undone
// before a token reaches this class.
// Source: Sennrich et al. 2016 (arXiv:1508.07909), on bytes as in GPT-2.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fedshard::data {

// Lookups by string_view without a copy.
struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <class Value>
using StringMap = std::unordered_map<std::string, Value, StringHash, std::equal_to<>>;

struct BpeDefinition {
  std::array<std::int32_t, 256> byte_ids;  // the token of each single byte
  struct Merge {
    std::int32_t left, right, merged;  // ids
  };
  std::vector<Merge> merges;      // in order of rank; a pair that comes again counts from its last place
  StringMap<std::int32_t> whole;  // ignore_merges: a piece in here is one token, whatever the merges say; else empty
};

// Not safe for use by two threads at a time: short pieces are remembered.
class Bpe {
 public:
  explicit Bpe(BpeDefinition definition);

  // Appends the ids of `piece`. Time O(n log n) in its length.
  void append(std::string_view piece, std::vector<std::int32_t>& ids);

 private:
  struct Ranked {
    std::uint32_t rank;
    std::int32_t merged;
  };
  struct PairHash {
    std::size_t operator()(std::uint64_t pair) const {
      const std::uint64_t mixed = (pair ^ (pair >> 32)) * 0x9E3779B97F4A7C15u;
      return mixed ^ (mixed >> 29);
    }
  };
  struct Symbol {
    std::int32_t id;              // negative: merged into the one before it
    std::int64_t previous, next;  // -1: none
  };
  struct Candidate {
    std::uint32_t rank;
    std::int64_t left;                              // index of the left symbol
    bool operator<(const Candidate& other) const {  // the heap's top is the largest
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };

  const Ranked* find(std::int64_t left) const;  // the merge of symbol `left` and the one after it; null: none
  void consider(std::int64_t left);
  void merge(std::string_view piece, std::vector<std::int32_t>& ids);

  BpeDefinition definition_;
  std::unordered_map<std::uint64_t, Ranked, PairHash> merges_;  // key: left id << 32 | right id
  StringMap<std::vector<std::int32_t>> remembered_;
  std::vector<Symbol> symbols_;        // scratch of merge()
  std::vector<Candidate> candidates_;  // scratch of merge(), a heap
};

}  // namespace fedshard::data
