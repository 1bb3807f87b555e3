#include "fedshard/train/inputs.h"

#include <cstdlib>

#include "fedshard/base/error.h"
#include "fedshard/config/options.h"
#include "fedshard/data/tokenizer.h"

namespace fedshard::train {
namespace {

std::shared_ptr<const data::TokenDataset> open_dataset(const std::vector<std::string>& patterns,
                                                       const config::Config& config, const data::Tokenizer& tokenizer,
                                                       const model::Dims& dims, const data::PrepareCallback& progress) {
  const auto files = data::resolve_data(patterns, tokenizer, data_cache(), data::BadRecords::fail, progress);
  auto dataset = std::make_shared<const data::TokenDataset>(files, config.training.seq_len);
  dataset->require_vocab_size(dims.vocab_size);
  return dataset;
}

}  // namespace

std::filesystem::path data_cache() {
  if (const char* folder = std::getenv("XDG_CACHE_HOME"); folder != nullptr && *folder != '\0') {
    return std::filesystem::path(folder) / "fedshard";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return std::filesystem::path(home) / ".cache" / "fedshard";
  }
  base::fail<base::UsageError>("neither XDG_CACHE_HOME nor HOME is set: there is no folder for prepared text");
}

Inputs open_inputs(const config::Config& config, const data::PrepareCallback& progress) {
  Inputs inputs;
  inputs.dims = config::dims_of(config.model);
  inputs.plan = config::plan_of(config, inputs.dims);
  const auto tokenizer = data::load_tokenizer(config.data.tokenizer);
  if (tokenizer->vocab_size() > inputs.dims.vocab_size) {
    base::fail<base::UsageError>(
        "the tokenizer '{}' has {} ids but the model a vocab_size of {}; set [model] "
        "vocab_size to at least {}, or choose a smaller tokenizer",
        config.data.tokenizer, tokenizer->vocab_size(), inputs.dims.vocab_size, tokenizer->vocab_size());
  }
  inputs.train = open_dataset(config.data.train, config, *tokenizer, inputs.dims, progress);
  if (!config.data.eval.empty()) {
    inputs.eval = open_dataset(config.data.eval, config, *tokenizer, inputs.dims, progress);
  }
  if (config.training.document_mask) inputs.document_end = tokenizer->end_of_text();
  if (!config.model.hf.empty()) inputs.weights.emplace(config.model.hf, inputs.plan);
  return inputs;
}

}  // namespace fedshard::train
