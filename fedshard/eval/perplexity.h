// Perplexity over an evaluation set: the exponential of (sum of losses / sum of tokens) over all ranks, never a mean of
// means. Every rank makes the same number of forward passes, because they gather together; a rank whose sequences have
// run out goes on with masked ones.
#pragma once
#include <cstdint>
#include <optional>

#include "fedshard/data/loader.h"
#include "fedshard/shard/engine.h"

namespace fedshard::eval {

struct EvalOptions {
  std::int64_t batch = 1;  // sequences a rank and pass
  // 0: the whole set. Otherwise its first max_passes * batch * world sequences, so that one rank with a batch of 4 and
  // four ranks with 1 evaluate the same ones.
  std::int64_t max_passes = 0;
  std::optional<std::int64_t> document_end = {};  // see nn::micro_batch_of
};

struct EvalResult {
  double loss = 0;  // mean over `tokens`
  std::int64_t tokens = 0;
  double perplexity() const;
};

// Of this rank's part of the set, which is dealt over all ranks of all groups. `parameters` in place of the engine's
// own. Collective over the shard axis.
shard::LossSum evaluate(shard::Engine& engine, const shard::Arena& parameters, const data::TokenDataset& dataset,
                        int world, int rank, const EvalOptions& options);

// Of all ranks' parts together. Collective over the world; the same bits everywhere.
EvalResult sum_over_world(const comm::Axes& axes, const shard::LossSum& mine);

}  // namespace fedshard::eval
