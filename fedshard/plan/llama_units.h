// A Llama as units: the embedding, each block, and the head (final norm and lm_head).
//
// With tied embeddings the table belongs to the first stage and to the last, so it forms one root unit together with
// the final norm, which is unit 0; the last stage then uses unit 0 and the plan has no unit named "head".
#pragma once
#include "fedshard/model/dims.h"
#include "fedshard/plan/units.h"

namespace fedshard::plan {

// Units in order: "embedding" {embed_tokens}; "block 0" … each {input_layernorm, q, k, v, o, post_attention_layernorm,
// gate, up, down}; "head" {norm, lm_head}. Tied: "root" {embed_tokens, norm}, then the blocks.
// Stages in order: "embedding", "block 0" …, "head". Initialisers are transformers' (matrices normal(0,
// initializer_range), norms one). The plan is valid; throws UsageError where `dims` is not.
ModelPlan llama_plan(const model::Dims& dims);

}  // namespace fedshard::plan
