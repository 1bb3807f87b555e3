#include "fedshard/nn/llama.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>

#include <memory>

#include "fedshard/base/error.h"
#include "fedshard/nn/block.h"
#include "fedshard/nn/ops/cross_entropy.h"
#include "fedshard/nn/ops/rms_norm.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::nn {

at::Tensor llama_logits(const model::Dims& dims, Parameters head, const at::Tensor& hidden) {
  base::require(head.size() == 2, "the head's unit has 2 parameters, not {}", head.size());
  const at::Tensor& norm = dims.tie_word_embeddings ? head[1] : head[0];
  const at::Tensor& table = dims.tie_word_embeddings ? head[0] : head[1];
  return at::linear(rms_norm(hidden, norm, dims.rms_norm_eps), table);
}

Model make_llama(const model::Dims& dims) {
  Model model{plan::llama_plan(dims), {}};
  // The table is the first parameter of the first stage's unit, tied or not.
  model.stages.emplace_back(
      [](Parameters unit, const at::Tensor&, const MicroBatch& batch) { return at::embedding(unit[0], batch.tokens); });
  const auto cache = std::make_shared<const RotaryCache>(dims);
  for (std::int64_t layer = 0; layer < dims.num_hidden_layers; ++layer) {
    model.stages.emplace_back([dims, cache](Parameters unit, const at::Tensor& hidden, const MicroBatch&) {
      const RotaryTables tables = cache->tables(hidden.size(1), hidden.device(), hidden.scalar_type());
      return block_forward(dims, unit, hidden, tables);
    });
  }
  model.stages.emplace_back([dims](Parameters unit, const at::Tensor& hidden, const MicroBatch& batch) {
    const at::Tensor logits = llama_logits(dims, unit, hidden);
    return cross_entropy_sum(logits.view({-1, dims.vocab_size}), batch.labels.reshape({-1}));
  });
  return model;
}

}  // namespace fedshard::nn
