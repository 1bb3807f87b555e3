#include "fedshard/data/loader.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/data/permutation.h"

namespace fedshard::data {

TokenDataset::TokenDataset(const std::vector<std::filesystem::path>& files, std::int64_t seq_len)
    : starts_{0}, seq_len_(seq_len) {
  if (files.empty()) base::fail<base::UsageError>("no data: give at least one file");
  if (seq_len < 1) base::fail<base::UsageError>("seq_len is {}, it must be at least 1", seq_len);
  std::vector<std::string> names;
  for (const std::filesystem::path& path : files) {
    const TokenFile& file = files_.emplace_back(path);
    names.push_back(path.string());
    starts_.push_back(starts_.back() + file.info().tokens);
    const TokenFile& first = files_.front();
    if (file.info().fingerprint != first.info().fingerprint) {
      base::fail<base::UsageError>("{} was prepared with tokenizer {}, {} with {}; prepare both with the same",
                                   path.string(), file.info().fingerprint, first.path().string(),
                                   first.info().fingerprint);
    }
  }
  sequences_ = tokens() > 0 ? (tokens() - 1) / seq_len : 0;
  if (sequences_ == 0) {
    base::fail<base::UsageError>(
        "{} token{} in {} are not enough for one sequence: seq_len {} needs {}; add data or "
        "lower seq_len",
        tokens(), tokens() == 1 ? "" : "s", fmt::join(names, ", "), seq_len, seq_len + 1);
  }
}

std::int64_t TokenDataset::max_id() const {
  std::int64_t largest = -1;
  for (const TokenFile& file : files_) largest = std::max(largest, file.info().max_id);
  return largest;
}

void TokenDataset::require_vocab_size(std::int64_t vocab_size) const {
  for (const TokenFile& file : files_) {
    if (file.info().max_id < vocab_size) continue;
    base::fail<base::UsageError>(
        "{}: holds the token id {}, the model's vocab_size is {}; set vocab_size to at least "
        "{} (the tokenizer's), or prepare the text with a smaller tokenizer",
        file.path().string(), file.info().max_id, vocab_size, file.info().vocab_size);
  }
}

void TokenDataset::read(std::int64_t index, std::span<std::int32_t> out) const {
  base::require(index >= 0 && index < sequences_, "sequence {} of {}", index, sequences_);
  base::require(std::cmp_equal(out.size(), seq_len_ + 1), "room for {} ids of {}", out.size(), seq_len_ + 1);
  std::int64_t at = index * seq_len_;
  auto file = static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin() - 1);
  for (; !out.empty(); ++file) {
    const auto part = files_[file].tokens().subspan(static_cast<std::size_t>(at - starts_[file]));
    const std::size_t n = std::min(part.size(), out.size());
    std::copy_n(part.begin(), n, out.begin());
    out = out.subspan(n);
    at += static_cast<std::int64_t>(n);
  }
}

std::int64_t sequence_at(std::int64_t n, std::uint64_t seed, std::int64_t position) {
  base::require(n >= 1 && position >= 0, "position {} of a stream of {} sequences", position, n);
  return Permutation(n, seed, position / n)(position % n);
}

Loader::Loader(std::shared_ptr<const TokenDataset> dataset, std::uint64_t seed, Dealing dealing, std::int64_t position)
    : dataset_(std::move(dataset)), seed_(seed) {
  set_dealing(dealing);
  set_position(position);
}

void Loader::next(std::span<std::int32_t> out) {
  base::require(std::cmp_equal(out.size(), ids_per_step()), "room for {} ids of {}", out.size(), ids_per_step());
  const auto window = static_cast<std::size_t>(dataset_->seq_len() + 1);
  for (const std::int64_t index : indices()) {
    dataset_->read(index, out.first(window));
    out = out.subspan(window);
  }
  position_ += dealing_.world_batch;
}

std::vector<std::int64_t> Loader::indices() const {
  std::vector<std::int64_t> indices(static_cast<std::size_t>(dealing_.count));
  std::int64_t position = position_ + dealing_.offset;
  for (std::int64_t& index : indices) index = sequence_at(dataset_->size(), seed_, position++);
  return indices;
}

void Loader::set_position(std::int64_t position) {
  base::require(position >= 0, "position {} of a stream of sequences", position);
  position_ = position;
}

void Loader::set_dealing(Dealing dealing) {
  base::require(dealing.world_batch >= 1 && dealing.offset >= 0 && dealing.count >= 0 &&
                    dealing.offset + dealing.count <= dealing.world_batch,
                "a rank takes {} sequences from number {} of a step of {}", dealing.count, dealing.offset,
                dealing.world_batch);
  dealing_ = dealing;
}

EvalSlice eval_slice(std::int64_t n, std::int64_t ranks, std::int64_t rank, std::int64_t batch) {
  base::require(n >= 0 && rank >= 0 && rank < ranks && batch >= 1, "evaluation of {} sequences on rank {} of {} by {}",
                n, rank, ranks, batch);
  const std::int64_t each = n / ranks;
  const std::int64_t one_more = n % ranks;  // ranks, the first ones, that take each + 1
  const std::int64_t largest = each + (one_more > 0 ? 1 : 0);
  return {rank * each + std::min(rank, one_more), each + (rank < one_more ? 1 : 0), (largest + batch - 1) / batch};
}

}  // namespace fedshard::data
