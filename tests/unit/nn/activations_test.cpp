// The closed forms of model/activations.h against the bytes that really live, stage by stage as the engine runs them.
#include "fedshard/model/activations.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "fedshard/base/error.h"
#include "fedshard/nn/llama.h"
#include "tests/support/memory_meter.h"

namespace fedshard::nn {
namespace {

using model::ActivationCheckpoint;
using model::MicroStepShape;

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

// What a bf16 product may take for itself on a CPU.
constexpr std::int64_t kKernelScratch = std::int64_t{128} << 10;

// A micro-step's forward; counts what its stages allocate and keep.
struct Measured {
  std::int64_t blocks = 0;     // kept before the head: the embedding's output, the blocks' and the rotary tables
  std::int64_t head = 0;       // kept by the head
  std::int64_t head_peak = 0;  // while the head computes, beyond `blocks`
  std::int64_t again = 0;      // `full`: with the head gone and the last block run once more
};

class MicroStepRun {
 public:
  MicroStepRun(const model::Dims& dims, const MicroStepShape& shape)
      : dtype_(shape.element == 4 ? at::kFloat : at::kBFloat16),
        full_(shape.activation_checkpoint == ActivationCheckpoint::full),
        model_(make_llama(dims, {shape.activation_checkpoint})),
        units_(parameters_of(model_.plan, dtype_)) {
    const at::Tensor ids = at::arange(shape.batch * shape.seq_len, at::kLong).remainder(dims.vocab_size);
    batch_ = {ids.view({shape.batch, shape.seq_len}), ids.view({shape.batch, shape.seq_len}).clone()};
    // Documents of 1, 2, 4, ... tokens; the last one ends with the row.
    if (shape.packed) {
      const at::Tensor place = at::arange(1, shape.seq_len + 1, at::kFloat);
      batch_.documents = place.log2().floor().to(at::kLong).expand({shape.batch, shape.seq_len}).contiguous();
    }
  }

  // Forward and backward of a micro-step; the most that lived at once. The parameters' gradients are there beforehand.
  std::int64_t peak() {
    for (const auto& unit : units_) {
      for (const at::Tensor& p : unit) p.mutable_grad() = at::zeros_like(p);
    }
    const testing_support::MemoryMeter meter;
    const int last = static_cast<int>(model_.stages.size()) - 1;
    for (int s = 0; s <= last; ++s) forward(s, full_ && s > 0 && s < last);
    at::Tensor gradient = at::ones({}, at::kFloat);
    for (int s = last; s >= 0; --s) {
      if (full_ && s > 0 && s < last) {
        outputs_[s].reset();
        forward(s, false);
      }
      torch::autograd::backward({outputs_[s]}, {gradient});
      gradient = s > 0 ? inputs_[s].grad() : at::Tensor();
      outputs_[s].reset();
      inputs_[s].reset();
    }
    return meter.peak();
  }

  Measured measure() {
    Measured result;
    const int last = static_cast<int>(model_.stages.size()) - 1;
    const testing_support::MemoryMeter meter;
    for (int s = 0; s < last; ++s) forward(s, full_ && s > 0);
    result.blocks = meter.live();
    {
      const testing_support::MemoryMeter head;
      forward(last, false);
      result.head = head.live();
      result.head_peak = head.peak();
    }
    if (full_) {
      outputs_[last].reset();
      outputs_[last - 1].reset();
      inputs_[last].reset();
      forward(last - 1, false);
      result.again = meter.live() + result.head;  // whose end this meter has seen, but not its beginning
    }
    return result;
  }

 private:
  void forward(int stage, bool without_graph) {
    inputs_.resize(model_.stages.size());
    outputs_.resize(model_.stages.size());
    const c10::AutoGradMode mode(!without_graph);
    if (stage > 0) inputs_[stage] = outputs_[stage - 1].detach().set_requires_grad(true);
    outputs_[stage] = model_.stages[stage](units_[model_.plan.stages[stage].units.at(0)], inputs_[stage], batch_);
  }

  at::ScalarType dtype_;
  bool full_;
  Model model_;
  std::vector<std::vector<at::Tensor>> units_;
  MicroBatch batch_;
  std::vector<at::Tensor> inputs_, outputs_;
};

void expect_measured(const model::Dims& dims, std::int64_t batch, std::int64_t seq_len) {
  for (const auto mode : {ActivationCheckpoint::none, ActivationCheckpoint::selective, ActivationCheckpoint::full}) {
    for (const std::int64_t element : {4, 2}) {
      for (const bool packed : {false, true}) {
        const MicroStepShape shape{batch, seq_len, element, mode, packed};
        SCOPED_TRACE(testing::Message() << batch << " rows of " << seq_len << ", " << element << " bytes, mode "
                                        << static_cast<int>(mode) << (packed ? ", packed" : ""));
        const Measured measured = MicroStepRun(dims, shape).measure();
        const std::int64_t boundary = batch * seq_len * dims.hidden_size * element;
        const std::int64_t tables = 2 * seq_len * dims.head_size() * element;
        const std::int64_t blocks = dims.num_hidden_layers * model::block_activation_bytes(dims, shape);
        EXPECT_EQ(measured.blocks, boundary + blocks + tables);
        EXPECT_EQ(measured.head, model::head_activation_bytes(dims, shape));
        const std::int64_t head_moment =
            model::head_activation_bytes(dims, shape) + model::head_working_bytes(dims, shape);
        EXPECT_LE(measured.head_peak, head_moment + (element == 4 ? 0 : kKernelScratch));
        EXPECT_GE(measured.head_peak, head_moment - head_moment / 100);
        if (mode == ActivationCheckpoint::full) {
          EXPECT_EQ(measured.again, blocks + tables +
                                        model::block_activation_bytes(
                                            dims, {batch, seq_len, element, ActivationCheckpoint::none, packed}));
        }
      }
    }
  }
}

TEST(Activations, EqualWhatLives) {
  expect_measured(dims_of(96, 256, 3, 4, 2, 320, false), 3, 64);   // grouped queries
  expect_measured(dims_of(64, 176, 2, 8, 8, 1009, true), 2, 131);  // tied, sizes that no kernel likes
  model::Dims wide = dims_of(48, 80, 1, 3, 1, 97, false);
  wide.head_dim = 32;  // more in the heads than in the hidden state
  expect_measured(wide, 1, 300);
  expect_measured(wide, 1, 1);
}

// Of one micro-step at its fullest: the embedding's output, what all blocks keep, the rotary tables, and the larger of
// two moments: the head computes, or the last block goes backward (with `full`, after it has been run again).
std::int64_t predicted_peak(const model::Dims& dims, const MicroStepShape& shape) {
  const std::vector<model::StageActivations> stages = model::llama_stage_activations(dims, shape);
  const model::StageActivations &embedding = stages.front(), &block = stages[1], &head = stages.back();
  const bool again = shape.activation_checkpoint == ActivationCheckpoint::full;
  const std::int64_t waiting = again ? block.output : block.kept;
  // Run again, the block's new output takes the place of the old one.
  const std::int64_t last = block.backward + (again ? block.kept - block.output : 0);
  return embedding.kept + dims.num_hidden_layers * waiting + std::max(head.kept + head.forward, last) +
         model::rotary_table_bytes(dims, shape);
}

// With a large vocabulary while the head computes, with a small one in the last block's backward.
TEST(Activations, PredictThePeakOfAMicroStep) {
  for (const std::int64_t vocabulary : {200, 8000}) {
    const model::Dims dims = dims_of(128, 352, 2, 4, 2, vocabulary, false);
    for (const auto mode : {ActivationCheckpoint::none, ActivationCheckpoint::selective, ActivationCheckpoint::full}) {
      for (const std::int64_t element : {4, 2}) {
        SCOPED_TRACE(testing::Message() << vocabulary << " tokens, mode " << static_cast<int>(mode) << ", " << element
                                        << " bytes");
        const MicroStepShape shape{3, 256, element, mode};
        const std::int64_t predicted = predicted_peak(dims, shape);
        const std::int64_t measured = MicroStepRun(dims, shape).peak();
        EXPECT_LE(measured, predicted + predicted / 50 + (element == 4 ? 0 : kKernelScratch));
        EXPECT_GE(measured, predicted - predicted / 50);
      }
    }
  }
}

TEST(Activations, TheHeadOfALargeVocabularyIsChunked) {
  const model::Dims dims = dims_of(8, 16, 1, 1, 1, 1 << 18, false);
  ASSERT_EQ(model::head_chunk_rows(dims), 64);
  expect_measured(dims, 1, 131);
}

TEST(Activations, CheckpointingKeepsLess) {
  const model::Dims dims = model::preset("llama-60m");
  const auto bytes = [&](ActivationCheckpoint mode) {
    return model::block_activation_bytes(dims,
                                         {.batch = 8, .seq_len = 512, .element = 2, .activation_checkpoint = mode});
  };
  EXPECT_LT(bytes(ActivationCheckpoint::full), bytes(ActivationCheckpoint::selective));
  EXPECT_LT(bytes(ActivationCheckpoint::selective), bytes(ActivationCheckpoint::none));
  // The largest of Llama 3.1: a batch's logits alone would be 8,192 x 128,256 x 4 bytes.
  const model::Dims large = model::preset("llama3.1-70b");
  EXPECT_LT(model::head_working_bytes(large, {.batch = 1, .seq_len = 8192, .element = 2}), std::int64_t{1} << 30);
}

TEST(Activations, RefuseSizesBelowOne) {
  const model::Dims dims = dims_of(96, 256, 3, 4, 2, 320, false);
  EXPECT_THROW(model::llama_stage_activations(dims, {.batch = 0}), base::RunError);
  EXPECT_THROW(model::llama_stage_activations(dims, {.seq_len = 0}), base::RunError);
  EXPECT_THROW(model::llama_stage_activations(dims, {.element = 0}), base::RunError);
  EXPECT_THROW(model::llama_stage_activations({}, {}), base::UsageError);
}

}  // namespace
}  // namespace fedshard::nn
