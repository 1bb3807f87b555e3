#include "fedshard/model/activations.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "fedshard/base/error.h"
#include "fedshard/nn/llama.h"
#include "tests/support/memory_meter.h"

namespace fedshard::nn {
namespace {

model::Dims dims_of(std::int64_t hidden, std::int64_t intermediate, std::int64_t layers, std::int64_t heads,
                    std::int64_t key_value_heads, std::int64_t vocab, bool tied) {
  model::Dims dims;
  dims.hidden_size = hidden;
  dims.intermediate_size = intermediate;
  dims.num_hidden_layers = layers;
  dims.num_attention_heads = heads;
  dims.num_key_value_heads = key_value_heads;
  dims.vocab_size = vocab;
  dims.tie_word_embeddings = tied;
  return dims;
}

std::vector<std::vector<at::Tensor>> parameters_of(const plan::ModelPlan& plan, at::ScalarType dtype) {
  std::vector<std::vector<at::Tensor>> units;
  for (const plan::UnitSpec& unit : plan.units) {
    units.emplace_back();
    for (const plan::ParameterSpec& spec : unit.parameters) {
      units.back().push_back(at::full(spec.shape, 0.01, dtype).set_requires_grad(true));
    }
  }
  return units;
}

// The bytes that live after a forward pass as the engine runs it, a graph a stage.
std::int64_t measured_bytes(const model::Dims& dims, std::int64_t batch, std::int64_t seq_len, at::ScalarType dtype) {
  const Model model = make_llama(dims);
  const auto parameters = parameters_of(model.plan, dtype);
  const at::Tensor ids = at::arange(batch * seq_len, at::kLong).remainder(dims.vocab_size).view({batch, seq_len});
  const MicroBatch micro_batch{ids, ids.clone()};
  const testing_support::MemoryMeter meter;
  std::vector<at::Tensor> inputs, outputs;
  for (std::size_t s = 0; s < model.stages.size(); ++s) {
    inputs.push_back(s == 0 ? at::Tensor() : outputs.back().detach().set_requires_grad(true));
    outputs.push_back(model.stages[s](parameters[model.plan.stages[s].unit], inputs.back(), micro_batch));
  }
  return meter.live();
}

void expect_measured(const model::Dims& dims, std::int64_t batch, std::int64_t seq_len) {
  for (const auto& [dtype, element] : {std::pair{at::kFloat, 4}, {at::kBFloat16, 2}}) {
    EXPECT_EQ(model::llama_activation_bytes(dims, batch, seq_len, element), measured_bytes(dims, batch, seq_len, dtype))
        << c10::toString(dtype) << ", " << batch << " sequences of " << seq_len << " tokens";
  }
}

TEST(Activations, EqualWhatAutogradKeeps) {
  expect_measured(dims_of(96, 256, 3, 4, 2, 320, false), 3, 64);   // grouped queries
  expect_measured(dims_of(64, 176, 2, 8, 8, 1009, true), 2, 131);  // tied, sizes that no kernel likes
  model::Dims wide = dims_of(48, 80, 1, 3, 1, 97, false);
  wide.head_dim = 32;  // more in the heads than in the hidden state
  expect_measured(wide, 1, 300);
  expect_measured(wide, 1, 1);
}

TEST(Activations, RefuseSizesBelowOne) {
  const model::Dims dims = dims_of(96, 256, 3, 4, 2, 320, false);
  EXPECT_THROW(model::llama_activation_bytes(dims, 0, 8, 4), base::RunError);
  EXPECT_THROW(model::llama_activation_bytes(dims, 1, 0, 4), base::RunError);
  EXPECT_THROW(model::llama_activation_bytes({}, 1, 8, 4), base::UsageError);
}

}  // namespace
}  // namespace fedshard::nn
