// What a run reads: the tokenizer, the token files, and weights to go on from. Everything that can be wrong with them
// is found here, before any rank starts or any process group exists.
#pragma once
#include <memory>
#include <optional>

#include "fedshard/checkpoint/hf.h"
#include "fedshard/config/config.h"
#include "fedshard/data/loader.h"
#include "fedshard/data/prepare.h"
#include "fedshard/model/dims.h"
#include "fedshard/plan/units.h"

namespace fedshard::train {

struct Inputs {
  model::Dims dims;
  plan::ModelPlan plan;
  std::shared_ptr<const data::TokenDataset> train;
  std::shared_ptr<const data::TokenDataset> eval;  // null where the config names no evaluation data
  std::optional<std::int64_t> document_end;        // the token that ends a document, where documents are kept apart
  std::optional<checkpoint::HfWeights> weights;    // empty: the model starts from random numbers
};

// Raw text is prepared on first use, into data_cache(). Throws UsageError or DamagedError naming key or file: data that
// is missing or damaged, a tokenizer or token ids larger than the model's vocabulary, weights that don't fit the model.
Inputs open_inputs(const config::Config& config, const data::PrepareCallback& progress = {});

// Where prepared text is kept: fedshard/ in $XDG_CACHE_HOME, or in ~/.cache.
std::filesystem::path data_cache();

}  // namespace fedshard::train
