#include "fedshard/data/bpe.h"

#include <algorithm>
#include <utility>

namespace fedshard::data {
namespace {

// Words of natural text are short and repeat; 65,536 of them are some 10 MB.
constexpr std::size_t kRememberedLength = 32;
constexpr std::size_t kRememberedPieces = 1 << 16;

std::uint64_t key_of(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

Bpe::Bpe(BpeDefinition definition) : definition_(std::move(definition)) {
  merges_.reserve(definition_.merges.size());
  for (std::size_t rank = 0; rank < definition_.merges.size(); ++rank) {
    const auto& m = definition_.merges[rank];
    merges_.insert_or_assign(key_of(m.left, m.right), Ranked{static_cast<std::uint32_t>(rank), m.merged});
  }
  definition_.merges = {};
}

void Bpe::append(std::string_view piece, std::vector<std::int32_t>& ids) {
  if (piece.size() == 1) {
    ids.push_back(definition_.byte_ids[static_cast<unsigned char>(piece[0])]);
    return;
  }
  if (const auto whole = definition_.whole.find(piece); whole != definition_.whole.end()) {
    ids.push_back(whole->second);
    return;
  }
  if (piece.size() > kRememberedLength) return merge(piece, ids);
  auto known = remembered_.find(piece);
  if (known == remembered_.end()) {
    std::vector<std::int32_t> merged;
    merge(piece, merged);
    if (remembered_.size() == kRememberedPieces) remembered_.clear();
    known = remembered_.emplace(piece, std::move(merged)).first;
  }
  ids.insert(ids.end(), known->second.begin(), known->second.end());
}

const Bpe::Ranked* Bpe::find(std::int64_t left) const {
  const Symbol& symbol = symbols_[left];
  if (symbol.id < 0 || symbol.next < 0) return nullptr;
  const auto found = merges_.find(key_of(symbol.id, symbols_[symbol.next].id));
  return found == merges_.end() ? nullptr : &found->second;
}

void Bpe::consider(std::int64_t left) {
  const Ranked* const merge = left < 0 ? nullptr : find(left);
  if (merge == nullptr) return;
  candidates_.push_back({merge->rank, left});
  std::push_heap(candidates_.begin(), candidates_.end());
}

void Bpe::merge(std::string_view piece, std::vector<std::int32_t>& ids) {
  const auto length = static_cast<std::int64_t>(piece.size());
  symbols_.clear();
  candidates_.clear();
  for (std::int64_t i = 0; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(piece[i]);
    symbols_.push_back({definition_.byte_ids[byte], i - 1, i + 1 < length ? i + 1 : -1});
  }
  for (std::int64_t i = 0; i < length; ++i) consider(i);
  while (!candidates_.empty()) {
    std::pop_heap(candidates_.begin(), candidates_.end());
    const Candidate candidate = candidates_.back();
    candidates_.pop_back();
    // A merge of a neighbour may have made the candidate stale; what the symbols became was considered then.
    const Ranked* const merge = find(candidate.left);
    if (merge == nullptr || merge->rank != candidate.rank) continue;
    Symbol& left = symbols_[candidate.left];
    Symbol& right = symbols_[left.next];
    left.id = merge->merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols_[left.next].previous = candidate.left;
    consider(left.previous);
    consider(candidate.left);
  }
  for (std::int64_t i = 0; i >= 0; i = symbols_[i].next) ids.push_back(symbols_[i].id);
}

}  // namespace fedshard::data
