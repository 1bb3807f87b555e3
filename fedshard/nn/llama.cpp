#include "fedshard/nn/llama.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>

#include <algorithm>
#include <memory>

#include "fedshard/base/error.h"
#include "fedshard/nn/block.h"
#include "fedshard/nn/ops/linear_cross_entropy.h"
#include "fedshard/nn/ops/rms_norm.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::nn {
namespace {

struct Head {
  const at::Tensor& norm;
  const at::Tensor& table;
};

Head head_of(const model::Dims& dims, Parameters unit) {
  base::require(unit.size() == 2, "the head's unit has 2 parameters, not {}", unit.size());
  return dims.tie_word_embeddings ? Head{unit[1], unit[0]} : Head{unit[0], unit[1]};
}

StageFunction block_stage(const model::Dims& dims, bool recompute, std::shared_ptr<const RotaryCache> cache) {
  return [dims, recompute, cache](Parameters unit, const at::Tensor& hidden, const MicroBatch& batch) {
    BlockOptions options{{}, document_lengths(batch), recompute};
    // A row of documents may be longer than what the model has positions for.
    const std::int64_t tokens = hidden.size(1);
    const auto longest = std::max_element(options.documents.begin(), options.documents.end());
    const std::int64_t positions =
        options.documents.empty() ? tokens : std::max(*longest, std::min(tokens, dims.max_position_embeddings));
    options.tables = cache->tables(positions, hidden.device(), hidden.scalar_type());
    return block_forward(dims, unit, hidden, options);
  };
}

}  // namespace

at::Tensor llama_logits(const model::Dims& dims, Parameters head, const at::Tensor& hidden) {
  const auto& [norm, table] = head_of(dims, head);
  return at::linear(rms_norm(hidden, norm, dims.rms_norm_eps), table);
}

Model make_llama(const model::Dims& dims, const LlamaOptions& options) {
  Model model{plan::llama_plan(dims), {}};
  // The table is the first parameter of the first stage's unit, tied or not.
  model.stages.emplace_back(
      [](Parameters unit, const at::Tensor&, const MicroBatch& batch) { return at::embedding(unit[0], batch.tokens); });
  const bool recompute = options.activation_checkpoint == model::ActivationCheckpoint::selective;
  const auto cache = std::make_shared<const RotaryCache>(dims);
  for (std::int64_t layer = 0; layer < dims.num_hidden_layers; ++layer) {
    model.stages.push_back(block_stage(dims, recompute, cache));
  }
  model.stages.emplace_back([dims](Parameters unit, const at::Tensor& hidden, const MicroBatch& batch) {
    const auto& [norm, table] = head_of(dims, unit);
    const at::Tensor normal = rms_norm(hidden, norm, dims.rms_norm_eps);
    return linear_cross_entropy_sum(normal.view({-1, dims.hidden_size}), table, batch.labels.reshape({-1}),
                                    model::head_chunk_rows(dims));
  });
  return model;
}

}  // namespace fedshard::nn
