#include <gtest/gtest.h>

#include "fedshard/base/error.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::plan {
namespace {

TEST(LlamaPlan, UnitsHoldEveryParameterOnce) {
  for (const std::string& name : model::preset_names()) {
    model::Dims dims = model::preset(name);
    for (const bool tied : {false, true}) {
      dims.tie_word_embeddings = tied;
      EXPECT_EQ(llama_plan(dims).numel(), dims.parameter_count()) << name << " tied " << tied;
    }
  }
}

TEST(LlamaPlan, UntiedHasAUnitAStage) {
  const ModelPlan plan = llama_plan(model::preset("llama-tiny"));
  ASSERT_EQ(plan.units.size(), 6u);
  ASSERT_EQ(plan.stages.size(), 6u);
  for (int s = 0; s < 6; ++s) EXPECT_EQ(plan.stages[s].units, std::vector<int>{s});
  EXPECT_EQ(plan.units[0].name, "embedding");
  EXPECT_EQ(plan.units[4].name, "block 3");
  EXPECT_EQ(plan.units[5].name, "head");
  ASSERT_EQ(plan.units[5].parameters.size(), 2u);
  EXPECT_EQ(plan.units[5].parameters[0].name, "model.norm.weight");
  EXPECT_EQ(plan.units[5].parameters[1].name, "lm_head.weight");
}

TEST(LlamaPlan, TiedSharesOneRootUnitBetweenFirstAndLastStage) {
  model::Dims dims = model::preset("llama-tiny");
  dims.tie_word_embeddings = true;
  const ModelPlan plan = llama_plan(dims);
  ASSERT_EQ(plan.units.size(), 5u);
  ASSERT_EQ(plan.stages.size(), 6u);
  EXPECT_EQ(plan.stages.front().units, std::vector<int>{0});
  EXPECT_EQ(plan.stages.back().units, std::vector<int>{0});
  EXPECT_EQ(plan.stages[4].units, std::vector<int>{4});
  ASSERT_EQ(plan.units[0].parameters.size(), 2u);
  EXPECT_EQ(plan.units[0].parameters[0].name, "model.embed_tokens.weight");
  EXPECT_EQ(plan.units[0].parameters[1].name, "model.norm.weight");
}

TEST(LlamaPlan, ABlockHasItsShapesAndInitialisersInOrder) {
  model::Dims dims = model::preset("llama-tiny");
  dims.initializer_range = 0.5;
  const UnitSpec block = llama_plan(dims).units[2];
  struct Expected {
    std::string module;
    std::vector<std::int64_t> shape;
  };
  const std::vector<Expected> expected = {
      {"input_layernorm", {96}},      {"self_attn.q_proj", {96, 96}}, {"self_attn.k_proj", {48, 96}},
      {"self_attn.v_proj", {48, 96}}, {"self_attn.o_proj", {96, 96}}, {"post_attention_layernorm", {96}},
      {"mlp.gate_proj", {256, 96}},   {"mlp.up_proj", {256, 96}},     {"mlp.down_proj", {96, 256}}};
  ASSERT_EQ(block.parameters.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const ParameterSpec& parameter = block.parameters[i];
    EXPECT_EQ(parameter.name, "model.layers.1." + expected[i].module + ".weight");
    EXPECT_EQ(parameter.shape, expected[i].shape);
    const bool matrix = expected[i].shape.size() == 2;
    EXPECT_EQ(parameter.init.kind, matrix ? Initializer::Kind::normal : Initializer::Kind::constant);
    EXPECT_EQ(parameter.init.value, matrix ? 0.5 : 1.0);
    EXPECT_EQ(parameter.is_matrix(), matrix);
  }
}

TEST(LlamaPlan, RefusesSizesThatDoNotFit) {
  model::Dims dims = model::preset("llama-tiny");
  dims.num_attention_heads = 5;
  EXPECT_THROW(llama_plan(dims), base::UsageError);
}

}  // namespace
}  // namespace fedshard::plan
