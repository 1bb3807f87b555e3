#include "fedshard/plan/updates.h"

#include <gtest/gtest.h>

#include "fedshard/base/error.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::plan {
namespace {

ModelPlan tiny_llama(bool tied) {
  model::Dims dims = model::preset("llama-tiny");
  dims.tie_word_embeddings = tied;
  return llama_plan(dims);
}

// What the rules say of one parameter.
UpdateRule rule_of(const ModelPlan& plan, const UpdateOptions& options, const std::string& name) {
  const UpdateRules rules = update_rules(plan, options);
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (std::size_t p = 0; p < plan.units[u].parameters.size(); ++p) {
      if (plan.units[u].parameters[p].name == name) return rules[u][p];
    }
  }
  ADD_FAILURE() << "no parameter " << name;
  return {};
}

TEST(UpdateRules, WithoutGroupsMatricesDecay) {
  const UpdateOptions options{Update::sgd, 0.1, {}};
  for (const bool tied : {false, true}) {
    const ModelPlan plan = tiny_llama(tied);
    EXPECT_EQ(rule_of(plan, options, "model.embed_tokens.weight"), (UpdateRule{Update::sgd, 1, 0.1}));
    EXPECT_EQ(rule_of(plan, options, "model.layers.0.mlp.up_proj.weight"), (UpdateRule{Update::sgd, 1, 0.1}));
    EXPECT_EQ(rule_of(plan, options, "model.layers.0.input_layernorm.weight"), (UpdateRule{Update::sgd, 1, 0}));
    EXPECT_EQ(rule_of(plan, options, "model.norm.weight"), (UpdateRule{Update::sgd, 1, 0}));
  }
}

TEST(UpdateRules, TheFirstGroupThatMatchesCounts) {
  const UpdateOptions options{
      Update::adamw, 0.1, {{{"*norm*"}, 2, 0.3}, {{"lm_head.weight", "*layers.1.*"}, 0.5, {}}, {{"*"}, 3, {}}}};
  const ModelPlan plan = tiny_llama(false);
  EXPECT_EQ(rule_of(plan, options, "model.layers.1.input_layernorm.weight"), (UpdateRule{Update::adamw, 2, 0.3}));
  EXPECT_EQ(rule_of(plan, options, "model.layers.1.mlp.up_proj.weight"), (UpdateRule{Update::adamw, 0.5, 0.1}));
  EXPECT_EQ(rule_of(plan, options, "lm_head.weight"), (UpdateRule{Update::adamw, 0.5, 0.1}));
  EXPECT_EQ(rule_of(plan, options, "model.layers.0.mlp.up_proj.weight"), (UpdateRule{Update::adamw, 3, 0.1}));
}

TEST(UpdateRules, PatternsAreThoseOfAShell) {
  const ModelPlan plan = tiny_llama(false);
  const auto hit = [&](const std::string& pattern, const std::string& name) {
    return rule_of(plan, {Update::sgd, 0, {{{pattern}, 7, {}}}}, name).lr_factor == 7;
  };
  EXPECT_TRUE(hit("model.layers.?.mlp.*", "model.layers.1.mlp.down_proj.weight"));
  EXPECT_FALSE(hit("model.layers.[!1].*", "model.layers.1.mlp.down_proj.weight"));
  EXPECT_TRUE(hit("model.layers.[0-1].*", "model.layers.1.mlp.down_proj.weight"));
  EXPECT_FALSE(hit("model.layers.1.*", "model.layers.0.mlp.down_proj.weight"));
  EXPECT_FALSE(hit("model.norm.weight", "model.embed_tokens.weight"));
}

TEST(UpdateRules, APatternThatMatchesNothingIsRefusedByName) {
  for (const std::string pattern : {"model.layers.99.*", "norm", "Model.norm.weight", "", "model.norm.weight ", "["}) {
    try {
      update_rules(tiny_llama(false), {Update::adamw, 0, {{{"*", pattern}, 1, {}}}});
      ADD_FAILURE() << pattern;
    } catch (const base::UsageError& e) {
      EXPECT_EQ(std::string(e.what()), "the pattern '" + pattern +
                                           "' matches no parameter of the model; its names are "
                                           "like 'lm_head.weight'");
    }
  }
}

TEST(UpdateRules, MuonIsForTheMatricesOfBlocks) {
  const UpdateOptions options{Update::muon, 0.1, {{{"*.0.*"}, 0.5, {}}}};
  for (const bool tied : {false, true}) {
    const ModelPlan plan = tiny_llama(tied);
    EXPECT_EQ(rule_of(plan, options, "model.embed_tokens.weight"), (UpdateRule{Update::adamw, 1, 0.1}));
    EXPECT_EQ(rule_of(plan, options, "model.norm.weight"), (UpdateRule{Update::adamw, 1, 0}));
    EXPECT_EQ(rule_of(plan, options, "model.layers.0.self_attn.q_proj.weight"), (UpdateRule{Update::muon, 0.5, 0.1}));
    EXPECT_EQ(rule_of(plan, options, "model.layers.1.mlp.down_proj.weight"), (UpdateRule{Update::muon, 1, 0.1}));
    EXPECT_EQ(rule_of(plan, options, "model.layers.1.input_layernorm.weight"), (UpdateRule{Update::adamw, 1, 0}));
  }
  EXPECT_EQ(rule_of(tiny_llama(false), options, "lm_head.weight").update, Update::adamw);
}

// A block of 5 + 12 + 3 + 8 elements between an embedding and a head; the tensor of three dimensions is no matrix.
ModelPlan small_plan() {
  ModelPlan plan;
  plan.units = {{"embedding", {{"e", {4, 4}, {}}}},
                {"block", {{"a", {5}, {}}, {"b", {3, 4}, {}}, {"c", {3}, {}}, {"d", {2, 2, 2}, {}}}},
                {"head", {{"h", {10}, {}}}}};
  for (int u = 0; u < 3; ++u) plan.stages.push_back({plan.units[u].name, {u}});
  return plan;
}

TEST(Moments, RangesLeaveOutWhatMuonUpdates) {
  const ModelPlan plan = small_plan();
  const UpdateRules rules = update_rules(plan, {Update::muon, 0, {}});
  using Ranges = std::vector<std::vector<topology::Range>>;
  EXPECT_EQ(moment_ranges(plan, rules, 1, 1, 0), (Ranges{{{0, 16}}, {{0, 28}}, {{0, 10}}}));
  EXPECT_EQ(moment_ranges(plan, rules, 2, 1, 0), (Ranges{{{0, 16}}, {{0, 5}, {17, 28}}, {{0, 10}}}));
  EXPECT_EQ(moment_ranges(plan, rules, 2, 2, 0), (Ranges{{{0, 8}}, {{0, 5}}, {{0, 5}}}));
  EXPECT_EQ(moment_ranges(plan, rules, 2, 2, 1), (Ranges{{{8, 16}}, {{17, 28}}, {{5, 10}}}));
  EXPECT_EQ(moment_ranges(plan, rules, 2, 7, 2), (Ranges{{{6, 9}}, {}, {{4, 6}}}));
  EXPECT_EQ(moment_ranges(plan, rules, 1, 100, 99), (Ranges{{}, {}, {}}));
  EXPECT_EQ(moment_ranges(plan, rules, 3, 1, 0), (Ranges{{}, {}, {}}));
}

TEST(Moments, BytesAreOfTheRankThatHasMost) {
  const ModelPlan plan = small_plan();
  const auto bytes = [&](Update update, std::int64_t shards) {
    return moment_bytes(plan, update_rules(plan, {update, 0, {}}), shards);
  };
  EXPECT_EQ(bytes(Update::sgd, 2), 0);
  EXPECT_EQ(bytes(Update::sgd_momentum, 1), (16 + 32 + 16) * 4);
  EXPECT_EQ(bytes(Update::adamw, 1), 2 * (16 + 32 + 16) * 4);
  EXPECT_EQ(bytes(Update::adamw, 2), 2 * (16 + 16 + 16) * 4);
  // The second moment has no gaps: 16 + 5 + 11 + 10 elements; of two shards the second has 8 + 11 + 5.
  EXPECT_EQ(bytes(Update::muon, 1), (16 + 32 + 16 + 42) * 4);
  EXPECT_EQ(bytes(Update::muon, 2), (16 + 16 + 16 + 24) * 4);
}

TEST(Moments, OfMuonForLlama8b) {
  const ModelPlan plan = llama_plan(model::preset("llama3.1-8b"));
  const UpdateRules rules = update_rules(plan, {Update::muon, 0.1, {}});
  constexpr std::int64_t kTables = 2 * 128256LL * 4096, kNorms = 65 * 4096;
  EXPECT_EQ(moment_bytes(plan, rules, 1), (8'030'261'248 + kTables + kNorms) * 4);
}

TEST(UpdateBytes, AreThoseOfUnitsWithMuonsMatrices) {
  const ModelPlan plan = small_plan();
  const UpdateRules rules = update_rules(plan, {Update::muon, 0, {}});
  EXPECT_EQ(update_bytes(plan, rules, 1), 0);
  EXPECT_EQ(update_bytes(plan, rules, 2), 2 * 1 * 14 * 4);
  EXPECT_EQ(update_bytes(plan, rules, 5), 5 * 4 * 6 * 4);
  EXPECT_EQ(update_bytes(plan, update_rules(plan, {Update::adamw, 0, {}}), 5), 0);
}

TEST(UpdateWorkspace, IsTheLargestUnitAndTheLargestMatrix) {
  const ModelPlan plan = small_plan();
  const UpdateRules rules = update_rules(plan, {Update::muon, 0, {}});
  EXPECT_EQ(update_workspace_bytes(plan, rules, 1), 28 * 4 + (3 * 12 + 2 * 9) * 2);
  EXPECT_EQ(update_workspace_bytes(plan, rules, 5), 30 * 4 + (3 * 12 + 2 * 9) * 2);
  EXPECT_EQ(update_workspace_bytes(plan, update_rules(plan, {Update::sgd_momentum, 0, {}}), 5), 0);
}

}  // namespace
}  // namespace fedshard::plan
