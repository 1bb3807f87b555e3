#include "fedshard/plan/llama_units.h"

#include <string_view>

#include "fedshard/model/names.h"

namespace fedshard::plan {
namespace {

ParameterSpec matrix(std::string name, std::int64_t rows, std::int64_t columns, double std) {
  return {std::move(name), {rows, columns}, {Initializer::Kind::normal, std}};
}

ParameterSpec norm(std::string name, std::int64_t size) {
  return {std::move(name), {size}, {Initializer::Kind::constant, 1.0}};
}

UnitSpec block_unit(const model::Dims& dims, std::int64_t layer) {
  const std::int64_t hidden = dims.hidden_size;
  const auto norm_of = [&](std::string_view module) { return norm(model::block_parameter(layer, module), hidden); };
  const auto matrix_of = [&](std::string_view module, std::int64_t rows, std::int64_t columns) {
    return matrix(model::block_parameter(layer, module), rows, columns, dims.initializer_range);
  };
  return {fmt::format("block {}", layer),
          {norm_of(model::kInputNorm), matrix_of(model::kQueryProjection, dims.query_size(), hidden),
           matrix_of(model::kKeyProjection, dims.key_value_size(), hidden),
           matrix_of(model::kValueProjection, dims.key_value_size(), hidden),
           matrix_of(model::kOutputProjection, hidden, dims.query_size()), norm_of(model::kPostAttentionNorm),
           matrix_of(model::kGateProjection, dims.intermediate_size, hidden),
           matrix_of(model::kUpProjection, dims.intermediate_size, hidden),
           matrix_of(model::kDownProjection, hidden, dims.intermediate_size)}};
}

}  // namespace

ModelPlan llama_plan(const model::Dims& dims) {
  dims.validate();
  const auto table = [&](std::string_view name) {
    return matrix(std::string(name), dims.vocab_size, dims.hidden_size, dims.initializer_range);
  };
  const ParameterSpec final_norm = norm(std::string(model::kFinalNorm), dims.hidden_size);
  ModelPlan plan;
  if (dims.tie_word_embeddings) {
    plan.units.push_back({"root", {table(model::kEmbedTokens), final_norm}});
  } else {
    plan.units.push_back({"embedding", {table(model::kEmbedTokens)}});
  }
  plan.stages.push_back({"embedding", {0}, false});
  for (std::int64_t layer = 0; layer < dims.num_hidden_layers; ++layer) {
    plan.units.push_back(block_unit(dims, layer));
    plan.stages.push_back({plan.units.back().name, {static_cast<int>(layer) + 1}});
  }
  if (dims.tie_word_embeddings) {
    plan.stages.push_back({"head", {0}});
  } else {
    plan.units.push_back({"head", {final_norm, table(model::kLmHead)}});
    plan.stages.push_back({"head", {static_cast<int>(plan.units.size()) - 1}});
  }
  plan.validate();
  return plan;
}

}  // namespace fedshard::plan
