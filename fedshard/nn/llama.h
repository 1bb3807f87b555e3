// Llama as stages of tensors: embedding, blocks, head. The model of the engine (nn/unit_module.h) and, for evaluation
// and generation, its logits.
//
// The arithmetic follows transformers' LlamaForCausalLM step by step, rounding points in bf16 included, so that weights
// move between the two without a change of loss. Works on any device and in fp32 or bf16, whichever the parameters are
// in.
#pragma once
#include <ATen/core/Tensor.h>

#include "fedshard/model/activations.h"
#include "fedshard/model/dims.h"
#include "fedshard/nn/unit_module.h"

namespace fedshard::nn {

struct LlamaOptions {
  // `full` is the engine's affair: the stages are those of `none`. Gradients are equal to the bit in all modes.
  model::ActivationCheckpoint activation_checkpoint = model::ActivationCheckpoint::none;
};

// The plan is plan::llama_plan(dims). The stage functions are safe to call from several threads at once. Activations
// between stages are [B, T, hidden_size] in the compute dtype. Packed documents (MicroBatch::documents) are kept apart.
// A document longer than max_position_embeddings is a UsageError. Token ids and labels beyond the vocabulary make ATen
// throw on a CPU and assert on a GPU: check them before. The last stage computes its gradients in its forward (see
// ops/linear_cross_entropy.h), so its graph can be run backward once.
Model make_llama(const model::Dims& dims, const LlamaOptions& options = {});

// What the head computes before its loss: final norm, then the product with lm_head (or the tied table).
// `head` is the last stage's unit ({norm, lm_head}; tied: {embed_tokens, norm}), hidden [.., hidden_size] the last
// block's output. Returns [.., vocab_size] in the compute dtype: all of them, so for evaluation and generation.
at::Tensor llama_logits(const model::Dims& dims, Parameters head, const at::Tensor& hidden);

}  // namespace fedshard::nn
