#include "fedshard/plan/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "fedshard/base/error.h"
#include "fedshard/plan/check_schedule.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/plan/group_local.h"

namespace fedshard::plan {
namespace {

ModelPlan chain(int stages, bool tied, bool embedding_like) {
  ModelPlan plan;
  for (int s = 0; s < stages; ++s) {
    const bool last_shares = tied && s == stages - 1 && s > 0;
    if (!last_shares) {
      plan.units.push_back({fmt::format("unit {}", s), {{fmt::format("p{}", s), {3, 5}, {}}}});
    }
    plan.stages.push_back({fmt::format("stage {}", s), {last_shares ? 0 : s}, !(embedding_like && s == 0)});
  }
  plan.validate();
  return plan;
}

std::vector<std::string> lines(const ModelPlan& plan, const Schedule& schedule) {
  std::vector<std::string> text;
  for (const Op& op : schedule) text.push_back(describe(plan, op));
  return text;
}

std::int64_t count(const Schedule& schedule, OpKind kind) {
  return std::count_if(schedule.begin(), schedule.end(), [&](const Op& op) { return op.kind == kind; });
}

TEST(Schedule, IsTheOneOfTheWalkthrough) {
  const ModelPlan plan = chain(3, false, true);
  const std::vector<std::string> expected{
      "m0 gather unit 0",    "m0 gather unit 1",  "m0 forward stage 0",  "m0 release unit 0", "m0 gather unit 2",
      "m0 forward stage 1",  "m0 release unit 1", "m0 forward stage 2",  "m0 gather unit 1",  "m0 backward stage 2",
      "m0 reduce unit 2",    "m0 release unit 2", "m0 backward stage 1", "m0 reduce unit 1",  "m0 release unit 1",
      "m0 backward stage 0", "m0 reduce unit 0",  "step unit 0",         "step unit 1",       "step unit 2"};
  EXPECT_EQ(lines(plan, step_schedule(plan, {})), expected);
}

TEST(Schedule, ATiedRootStaysGatheredAndIsReducedOnce) {
  const ModelPlan plan = chain(4, true, true);
  const Schedule schedule = step_schedule(plan, {});
  const auto of_root = [&](OpKind kind) {
    return std::count_if(schedule.begin(), schedule.end(),
                         [&](const Op& op) { return op.kind == kind && op.unit == 0; });
  };
  EXPECT_EQ(of_root(OpKind::gather), 1);
  EXPECT_EQ(of_root(OpKind::release), 1);
  EXPECT_EQ(of_root(OpKind::reduce), 1);
  EXPECT_EQ(check_step_schedule(plan, {}, schedule), std::vector<std::string>{});
}

TEST(Schedule, RecomputesBlocksBeforeTheirBackward) {
  const ModelPlan plan = chain(3, false, true);
  const std::vector<std::string> expected{
      "m0 gather unit 0",   "m0 gather unit 1",    "m0 forward stage 0",   "m0 release unit 0",   "m0 gather unit 2",
      "m0 forward stage 1", "m0 release unit 1",   "m0 forward stage 2",   "m0 gather unit 1",    "m0 backward stage 2",
      "m0 reduce unit 2",   "m0 release unit 2",   "m0 recompute stage 1", "m0 backward stage 1", "m0 reduce unit 1",
      "m0 release unit 1",  "m0 backward stage 0", "m0 reduce unit 0",     "step unit 0",         "step unit 1",
      "step unit 2"};
  EXPECT_EQ(lines(plan, step_schedule(plan, {.recompute = true})), expected);
}

TEST(Schedule, StepsAUnitWhileTheNextOneIsReduced) {
  const ModelPlan plan = chain(3, false, true);
  std::vector<std::string> order;
  for (const std::string& line : lines(plan, step_schedule(plan, {.fused_backward = true}))) {
    if (line.find("reduce") != std::string::npos || line.find("step ") == 0) order.push_back(line);
  }
  EXPECT_EQ(order, (std::vector<std::string>{"m0 reduce unit 2", "m0 reduce unit 1", "step unit 2", "m0 reduce unit 0",
                                             "step unit 1", "step unit 0"}));
  EXPECT_THROW(step_schedule(plan, {.micro_steps = 2, .fused_backward = true}), base::RunError);
}

TEST(Schedule, FrozenStagesHaveNoBackwardBeforeTheFirstThatTrains) {
  const ModelPlan plan = freeze(chain(4, false, true), {"p[01]"});
  const Schedule schedule = step_schedule(plan, {});
  EXPECT_EQ(count(schedule, OpKind::forward), 4);
  EXPECT_EQ(count(schedule, OpKind::backward), 2);
  EXPECT_EQ(count(schedule, OpKind::reduce), 2);
  EXPECT_EQ(count(schedule, OpKind::step), 2);
  EXPECT_EQ(count(schedule, OpKind::gather), 4 + 1);  // stage 2 again for its backward
  // A frozen stage behind one that trains passes gradients on and has no others.
  const ModelPlan behind = freeze(chain(4, false, true), {"p1", "p2"});
  EXPECT_EQ(count(step_schedule(behind, {}), OpKind::backward), 4);
  EXPECT_EQ(count(step_schedule(behind, {}), OpKind::reduce), 2);
}

// cost.md section 1: Llama 8B in 34 units needs 66 gathers and 34 reductions.
TEST(Schedule, GathersAsOftenAsTheAnalysisSays) {
  const ModelPlan plan = chain(34, false, true);
  for (const int micro_steps : {1, 3}) {
    for (const int prefetch : {0, 1, 2}) {
      const Schedule resharded = step_schedule(plan, {micro_steps, true, prefetch});
      EXPECT_EQ(count(resharded, OpKind::gather), 66 * micro_steps);
      EXPECT_EQ(count(resharded, OpKind::reduce), 34 * micro_steps);
      EXPECT_EQ(count(step_schedule(plan, {micro_steps, false, prefetch}), OpKind::gather), 34 * micro_steps);
    }
  }
}

// Two parameters a unit, some of them frozen, but not all, and some of the others group-local.
ModelPlan random_plan(std::mt19937& random) {
  const int stages = 1 + static_cast<int>(random() % 9);
  ModelPlan plan = chain(stages, stages > 1 && random() % 2 == 0, random() % 2 == 0);
  std::vector<std::string> names;
  for (UnitSpec& unit : plan.units) {
    unit.parameters.push_back({unit.parameters[0].name + "b", {1}, {}});
    for (const ParameterSpec& parameter : unit.parameters) names.push_back(parameter.name);
  }
  if (random() % 2 == 0) return plan;
  std::shuffle(names.begin(), names.end(), random);
  const std::size_t frozen = random() % names.size(), local = random() % (names.size() - frozen);
  const auto end_of_frozen = names.begin() + static_cast<std::ptrdiff_t>(frozen);
  return keep_in_groups(freeze(plan, {names.begin(), end_of_frozen}),
                        {{}, {end_of_frozen, end_of_frozen + static_cast<std::ptrdiff_t>(local)}});
}

TEST(Schedule, TheCheckerProvesRandomSchedules) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const ModelPlan plan = random_plan(random);
    ScheduleOptions options{1 + static_cast<int>(random() % 4), random() % 2 == 0, static_cast<int>(random() % 4),
                            random() % 2 == 0, random() % 2 == 0};
    options.fused_backward = options.micro_steps == 1 && random() % 2 == 0;
    ASSERT_EQ(check_step_schedule(plan, options, step_schedule(plan, options)), std::vector<std::string>{})
        << "trial " << trial << ": " << plan.stages.size() << " stages, prefetch " << options.prefetch;
  }
}

TEST(Schedule, TheCheckerFindsEveryPlantedFault) {
  const ModelPlan plan = freeze(chain(5, false, true), {"p2"});
  const ScheduleOptions options{2, true, 1, true};
  const Schedule good = step_schedule(plan, options);
  ASSERT_EQ(check_step_schedule(plan, options, good), std::vector<std::string>{});
  for (std::size_t i = 0; i < good.size(); ++i) {
    Schedule missing = good;
    missing.erase(missing.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_NE(check_step_schedule(plan, options, missing), std::vector<std::string>{}) << "without " << i;
    Schedule twice = good;
    twice.insert(twice.begin() + static_cast<std::ptrdiff_t>(i), good[i]);
    EXPECT_NE(check_step_schedule(plan, options, twice), std::vector<std::string>{}) << "twice " << i;
  }
  EXPECT_NE(check_step_schedule(plan, options, step_schedule(plan, {2, true, 0, true})), std::vector<std::string>{});
  EXPECT_NE(check_step_schedule(plan, options, step_schedule(plan, {2, false, 1, true})), std::vector<std::string>{});
  EXPECT_NE(check_step_schedule(plan, options, step_schedule(plan, {2, true, 1, false})), std::vector<std::string>{});
  EXPECT_NE(check_step_schedule(plan, options, step_schedule(plan, {2, true, 1, true, false})),
            std::vector<std::string>{});
  EXPECT_NE(check_step_schedule(plan, {2, true, 1, true, false}, good), std::vector<std::string>{});
  Schedule with_exchange = good;
  with_exchange.push_back({OpKind::exchange});
  EXPECT_NE(check_step_schedule(plan, options, with_exchange), std::vector<std::string>{});
}

TEST(Schedule, EvaluationGathersEachUnitOnce) {
  for (const bool tied : {false, true}) {
    const ModelPlan plan = chain(6, tied, true);
    const Schedule schedule = evaluation_schedule(plan, 1);
    EXPECT_EQ(count(schedule, OpKind::gather), static_cast<std::int64_t>(plan.units.size()));
    EXPECT_EQ(count(schedule, OpKind::release), static_cast<std::int64_t>(plan.units.size()));
    EXPECT_EQ(count(schedule, OpKind::forward), 6);
    EXPECT_EQ(count(schedule, OpKind::backward) + count(schedule, OpKind::reduce) + count(schedule, OpKind::step), 0);
  }
}

TEST(Freeze, SplitsUnitsAndKeepsGlobalIndices) {
  ModelPlan plan{{{"a", {{"a.w", {2, 3}, {}}, {"a.b", {1}, {}}, {"a.v", {4}, {}}}}, {"z", {{"z.w", {5}, {}}}}},
                 {{"first", {0}}, {"last", {1}}}};
  const ModelPlan frozen = freeze(plan, {"*.b", "z.?"});
  ASSERT_EQ(frozen.units.size(), 3U);
  EXPECT_EQ(frozen.numel(), plan.numel());
  EXPECT_EQ(frozen.exchanged_numel(), 10);
  EXPECT_EQ(frozen.stages[0].units, (std::vector<int>{0, 1}));
  EXPECT_EQ(frozen.stages[1].units, (std::vector<int>{2}));
  EXPECT_EQ(frozen.units[0].places, (std::vector<int>{0, 2}));
  EXPECT_EQ(frozen.units[1].places, (std::vector<int>{1}));
  EXPECT_TRUE(frozen.units[1].frozen && frozen.units[2].frozen && !frozen.units[0].frozen);
  EXPECT_EQ(frozen.first_trained_stage(), 0);
  EXPECT_EQ(freeze(plan, {"a.*"}).first_trained_stage(), 1);
  // a.w is elements 0 to 5 of the model, a.b 6, a.v 7 to 10, z.w 11 to 15.
  EXPECT_EQ(frozen.global_runs(0, {4, 9}), (std::vector<GlobalRun>{{{4, 6}, 4}, {{6, 9}, 7}}));
  EXPECT_EQ(frozen.global_runs(1, {0, 1}), (std::vector<GlobalRun>{{{0, 1}, 6}}));
  EXPECT_EQ(frozen.global_runs(2, {2, 5}), (std::vector<GlobalRun>{{{2, 5}, 13}}));
  EXPECT_TRUE(frozen.global_runs(0, {3, 3}).empty());
  EXPECT_EQ(plan.global_runs(1, {2, 5}), (std::vector<GlobalRun>{{{2, 5}, 13}}));
}

TEST(Freeze, RefusesPatternsWithoutEffectAndModelsWithoutWork) {
  const ModelPlan plan = chain(3, true, true);
  for (const auto& [patterns, part] : {std::pair{std::vector<std::string>{"p0", "q*"}, "'q*' matches no parameter"},
                                       {{"p*"}, "every parameter is frozen"}}) {
    try {
      freeze(plan, patterns);
      ADD_FAILURE() << "accepted: " << part;
    } catch (const base::UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  }
}

TEST(Units, RefuseWhatTheEngineCannotRun) {
  const auto refused = [](auto change, const char* part) {
    ModelPlan plan = chain(3, false, true);
    change(plan);
    try {
      plan.validate();
      ADD_FAILURE() << "accepted: " << part;
    } catch (const base::UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  refused([](ModelPlan& p) { p.units[1].parameters.clear(); }, "'unit 1' has no parameters");
  refused([](ModelPlan& p) { p.units[1].parameters[0].shape = {0, 2}; }, "'p1' has a dimension of 0");
  refused([](ModelPlan& p) { p.units[2].parameters[0].name = "p0"; }, "two parameters have the name 'p0'");
  refused([](ModelPlan& p) { p.stages[2].units = {7}; }, "'stage 2' uses unit 7, but the model has 3 units");
  refused([](ModelPlan& p) { p.stages.pop_back(); }, "no stage uses unit 'unit 2'");
  refused(
      [](ModelPlan& p) {
        p.stages[1].units = {0};
        p.units.erase(p.units.begin() + 1);
        p.stages[2].units = {1};
      },
      "only the first and the last stage may share");
}

}  // namespace
}  // namespace fedshard::plan
