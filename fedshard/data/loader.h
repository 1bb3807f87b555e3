// The data order: which sequences a rank trains on at a step (design.md, section 7).
// Surprising: a position is a number of sequences consumed, never a step. So the dealing among ranks may change at any
// position and nothing is repeated or skipped.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "fedshard/data/token_file.h"

namespace fedshard::data {

// Token files, in the given order, as one stream of tokens; sequence i is the window of seq_len + 1 tokens at
// i * seq_len, a last partial window is dropped. Windows may span files. Safe from any thread.
class TokenDataset {
 public:
  // Opens the files (errors of TokenFile). Throws UsageError where there is no file, seq_len < 1, two files come from
  // different tokenizers, or the files hold not one sequence.
  TokenDataset(const std::vector<std::filesystem::path>& files, std::int64_t seq_len);

  std::int64_t size() const { return sequences_; }
  std::int64_t seq_len() const { return seq_len_; }
  std::int64_t tokens() const { return starts_.back(); }
  std::int64_t max_id() const;
  const std::vector<TokenFile>& files() const { return files_; }

  // Throws UsageError that names the file where an id is not below `vocab_size`, the model's.
  void require_vocab_size(std::int64_t vocab_size) const;

  // Fills `out`, of seq_len + 1 ids, with sequence `index` in [0, size()).
  void read(std::int64_t index, std::span<std::int32_t> out) const;

 private:
  std::vector<TokenFile> files_;
  std::vector<std::int64_t> starts_;  // position in the stream of each file's first token; at the end their sum
  std::int64_t seq_len_;
  std::int64_t sequences_;
};

// How the sequences of one step are dealt: the whole world takes `world_batch` of them, this rank `count`, beginning
// with number `offset` of the step. count = 0 is a rank that takes none.
struct Dealing {
  std::int64_t world_batch;
  std::int64_t offset;
  std::int64_t count;
};

// The endless stream of n >= 1 sequences, a new permutation each epoch: the index of the sequence at `position` >= 0,
// which is number position % n of epoch position / n. A step larger than what is left of an epoch runs over into the
// next ones.
std::int64_t sequence_at(std::int64_t n, std::uint64_t seed, std::int64_t position);

// One rank's walk along the stream. Its state is position(), equal on all ranks that have made as many steps; others
// never meet, since the same dealing gives each rank parts of its own. Not safe for use by two threads.
class Loader {
 public:
  Loader(std::shared_ptr<const TokenDataset> dataset, std::uint64_t seed, Dealing dealing, std::int64_t position = 0);

  std::int64_t position() const { return position_; }
  const Dealing& dealing() const { return dealing_; }

  // Ids that next() writes: count * (seq_len + 1).
  std::int64_t ids_per_step() const { return dealing_.count * (dataset_->seq_len() + 1); }

  // Fills `out`, of ids_per_step() ids, with this rank's sequences of the step, [count][seq_len + 1], and goes on by
  // world_batch.
  void next(std::span<std::int32_t> out);

  // The indices of the sequences that next() would write.
  std::vector<std::int64_t> indices() const;

  void set_position(std::int64_t position);  // as saved from position()
  void set_dealing(Dealing dealing);         // from the present position on; all ranks change at the same one

 private:
  std::shared_ptr<const TokenDataset> dataset_;
  std::uint64_t seed_;
  Dealing dealing_;
  std::int64_t position_;
};

// What a rank evaluates: sequences [first, first + count) in batches of at most `batch`. `passes` is the number of
// forward passes that every rank makes, those with less or nothing left on an empty or partial batch: collectives need
// all ranks.
struct EvalSlice {
  std::int64_t first;
  std::int64_t count;
  std::int64_t passes;
};

// Deals [0, n) to `ranks` in contiguous slices in rank order whose sizes differ by at most one.
EvalSlice eval_slice(std::int64_t n, std::int64_t ranks, std::int64_t rank, std::int64_t batch);

}  // namespace fedshard::data
