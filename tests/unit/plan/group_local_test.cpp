// Parameters that rounds leave out: units of their own, as frozen ones, in plans with and without those.
#include "fedshard/plan/group_local.h"

#include <gtest/gtest.h>

#include "fedshard/base/error.h"
#include "fedshard/model/dims.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/plan/llama_units.h"
#include "fedshard/plan/memory.h"

namespace fedshard::plan {
namespace {

ModelPlan two_units() {
  return {{{"a", {{"a.w", {2, 3}, {}}, {"a.b", {1}, {}}, {"a.v", {4}, {}}}}, {"z", {{"z.w", {5}, {}}}}},
          {{"first", {0}}, {"last", {1}}}};
}

std::vector<std::string> names_where(const ModelPlan& plan, bool (*holds)(const UnitSpec&)) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : plan.units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      if (holds(unit)) names.push_back(parameter.name);
    }
  }
  return names;
}

std::vector<std::string> exchanged(const ModelPlan& plan) {
  return names_where(plan, [](const UnitSpec& unit) { return unit.is_exchanged(); });
}

std::vector<std::string> group_local(const ModelPlan& plan) {
  return names_where(plan, [](const UnitSpec& unit) { return unit.group_local; });
}

using Names = std::vector<std::string>;

TEST(GroupLocal, SplitsUnitsAndKeepsGlobalIndices) {
  const ModelPlan plan = keep_in_groups(two_units(), {{}, {"*.b"}});
  ASSERT_EQ(plan.units.size(), 3U);
  EXPECT_EQ(plan.units[1].name, "a, group-local");
  EXPECT_TRUE(plan.units[1].group_local && !plan.units[1].frozen);
  EXPECT_EQ(plan.stages[0].units, (std::vector<int>{0, 1}));
  EXPECT_EQ(plan.stages[1].units, std::vector<int>{2});
  EXPECT_EQ(plan.units[0].places, (std::vector<int>{0, 2}));
  EXPECT_EQ(plan.units[1].places, std::vector<int>{1});
  EXPECT_EQ(plan.numel(), 16);
  EXPECT_EQ(plan.exchanged_numel(), 15);
  EXPECT_EQ(plan.exchanged_numel_by_unit(), (std::vector<std::int64_t>{10, 0, 5}));
  EXPECT_EQ(plan.first_trained_stage(), 0);
  // a.w is elements 0 to 5 of the model, a.b 6, a.v 7 to 10, z.w 11 to 15.
  EXPECT_EQ(plan.global_runs(0, {4, 9}), (std::vector<GlobalRun>{{{4, 6}, 4}, {{6, 9}, 7}}));
  EXPECT_EQ(plan.global_runs(1, {0, 1}), (std::vector<GlobalRun>{{{0, 1}, 6}}));
  EXPECT_EQ(plan.global_runs(2, {2, 5}), (std::vector<GlobalRun>{{{2, 5}, 13}}));
}

TEST(GroupLocal, IncludeAndExcludeTogether) {
  const auto kept = [](const ExchangePatterns& patterns) { return group_local(keep_in_groups(two_units(), patterns)); };
  EXPECT_EQ(kept({}), Names{});
  EXPECT_EQ(kept({{"*"}, {}}), Names{});
  EXPECT_EQ(kept({{"a.*"}, {}}), Names{"z.w"});
  EXPECT_EQ(kept({{}, {"z.w"}}), Names{"z.w"});  // a whole unit
  EXPECT_EQ(kept({{"a.*"}, {"a.v"}}), (Names{"a.v", "z.w"}));
  EXPECT_EQ(kept({{"a.b"}, {}}), (Names{"a.w", "a.v", "z.w"}));  // one element is left to exchange
  EXPECT_EQ(kept({{"*.w"}, {"a.w", "a.b"}}), (Names{"a.w", "a.b", "a.v"}));
  EXPECT_TRUE(keep_in_groups(two_units(), {}).units[0].origins.empty());  // nothing to split: the plan as it was
}

TEST(GroupLocal, AUnitMayHaveThreeParts) {
  const ModelPlan plan = keep_in_groups(freeze(two_units(), {"a.b"}), {{}, {"a.[bw]"}});
  ASSERT_EQ(plan.units.size(), 4U);
  EXPECT_EQ(plan.stages[0].units, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(exchanged(plan), (Names{"a.v", "z.w"}));
  EXPECT_EQ(group_local(plan), Names{"a.w"});
  EXPECT_TRUE(plan.units[2].frozen && !plan.units[2].group_local);  // frozen wins
  EXPECT_EQ(plan.units[0].places, std::vector<int>{2});
  EXPECT_EQ(plan.units[1].places, std::vector<int>{0});
  EXPECT_EQ(plan.units[2].places, std::vector<int>{1});
  EXPECT_EQ(plan.global_runs(0, {1, 4}), (std::vector<GlobalRun>{{{1, 4}, 8}}));
  EXPECT_EQ(plan.global_runs(1, {0, 6}), (std::vector<GlobalRun>{{{0, 6}, 0}}));
  EXPECT_EQ(plan.global_runs(2, {0, 1}), (std::vector<GlobalRun>{{{0, 1}, 6}}));
  // The other way round too.
  const ModelPlan again = freeze(keep_in_groups(two_units(), {{}, {"a.[bw]"}}), {"a.b"});
  EXPECT_EQ(exchanged(again), exchanged(plan));
  EXPECT_EQ(group_local(again), group_local(plan));
}

TEST(GroupLocal, OfATiedRootTheNormOrTheTable) {
  model::Dims dims = model::preset("llama-tiny");
  dims.tie_word_embeddings = true;
  const ModelPlan whole = llama_plan(dims);
  for (const auto& [pattern, left] : {std::pair{"model.norm.weight", "model.embed_tokens.weight"},
                                      std::pair{"model.embed_tokens.weight", "model.norm.weight"}}) {
    const ModelPlan plan = keep_in_groups(whole, {{}, {pattern}});
    EXPECT_EQ(group_local(plan), Names{pattern});
    EXPECT_EQ(plan.units[0].parameters[0].name, left);
    EXPECT_EQ(plan.stages.front().units, (std::vector<int>{0, 1}));
    EXPECT_EQ(plan.stages.back().units, (std::vector<int>{0, 1}));
  }
}

TEST(GroupLocal, RefusesPatternsWithoutEffectAndRoundsWithoutWork) {
  const auto refusal = [](const ModelPlan& plan, const ExchangePatterns& patterns) {
    try {
      keep_in_groups(plan, patterns);
    } catch (const base::UsageError& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal(two_units(), {{"a.x"}, {}}),
            "the pattern 'a.x' matches no parameter of the model; its names are like 'z.w'");
  EXPECT_EQ(refusal(two_units(), {{}, {"a.w", "b*"}}),
            "the pattern 'b*' matches no parameter of the model; its names are like 'z.w'");
  const std::string nothing = "no parameter that trains is left for rounds to exchange";
  EXPECT_EQ(refusal(two_units(), {{}, {"*"}}), nothing);
  EXPECT_EQ(refusal(two_units(), {{"a.*"}, {"a.*"}}), nothing);
  EXPECT_EQ(refusal(freeze(two_units(), {"a.*"}), {{"a.*"}, {}}), nothing);  // what is frozen is exchanged by nobody
}

// They train as the others do, and a round needs memory for the others alone.
TEST(GroupLocal, MemoryOfARoundIsThatOfWhatIsExchanged) {
  const ModelPlan whole = llama_plan(model::preset("llama-tiny"));
  const ModelPlan plan = keep_in_groups(whole, {{}, {"lm_head.weight", "model.embed_tokens.weight"}});
  const auto layout = topology::Layout::make(6, {.groups = 3});
  OuterOptions nesterov = usual_options(Outer::nesterov);
  const std::int64_t tables = 2 * whole.units[0].numel();
  EXPECT_EQ(plan.exchanged_numel(), whole.numel() - tables);
  EXPECT_EQ(outer_numel(whole, layout, 0, nesterov, {}) - outer_numel(plan, layout, 0, nesterov, {}),
            2 * tables / 2);  // anchor and moment of half of them
  EXPECT_LT(exchange_numel(plan, layout, 0), exchange_numel(whole, layout, 0));
  EXPECT_EQ(moment_bytes(plan, update_rules(plan, {}), 1), moment_bytes(whole, update_rules(whole, {}), 1));
}

}  // namespace
}  // namespace fedshard::plan
