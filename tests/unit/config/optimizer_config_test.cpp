// [optimizer], [[optimizer.group]] and [lr_scheduler].
#include "fedshard/config/config.h"

#include <gtest/gtest.h>

#include "tests/unit/config/config_text.h"

namespace fedshard::config {
namespace {

TEST(Config, MomentumDependsOnTheOptimizer) {
  const auto of = [](const std::vector<std::string>& overrides) {
    const OptimizerConfig optimizer = load(smallest, overrides).optimizer;
    return std::pair(optimizer.momentum, optimizer.nesterov);
  };
  using Given = std::pair<std::optional<double>, std::optional<bool>>;
  EXPECT_EQ(of({}), Given());
  EXPECT_EQ(of({"optimizer.name=sgd"}), Given(0.0, false));
  EXPECT_EQ(of({"optimizer.name=muon"}), Given(0.95, true));
  EXPECT_EQ(of({"optimizer.name=muon", "optimizer.momentum=0", "optimizer.nesterov=false"}), Given(0.0, false));
  EXPECT_EQ(of({"optimizer.nesterov=true", "optimizer.momentum=0.5", "optimizer.name=sgd"}), Given(0.5, true));
}

TEST(Config, ListsOfTablesKeepTheirOrder) {
  const std::string text =
      smallest + "[[optimizer.group]]\nparams = \"a\"\n[[optimizer.group]]\nparams = [\"b\", \"c\"]\n";
  const auto given = load(text).optimizer.groups;
  EXPECT_EQ(given, (std::vector<plan::ParameterGroup>{{{"a"}, 1, {}}, {{"b", "c"}, 1, {}}}));
  const auto replaced = load(text, {"optimizer.group=[{params = \"d\", lr_factor = 2}]"}).optimizer.groups;
  EXPECT_EQ(replaced, (std::vector<plan::ParameterGroup>{{{"d"}, 2, {}}}));
  EXPECT_TRUE(load(text, {"optimizer.group=[]"}).optimizer.groups.empty());
  EXPECT_EQ(load(smallest + "[optimizer]\ngroup = [{params = \"e\"}]\n").optimizer.groups.at(0).params.at(0), "e");
}

TEST(Config, ListsOfTablesAreReadAsStrictlyAsTables) {
  const std::string expected = "'group' is a list of tables, write [[optimizer.group]]";
  EXPECT_EQ(refusal("[optimizer.group]\nparams = \"a\"\n"), "run.toml:1: " + expected);
  EXPECT_EQ(refusal("[optimizer]\ngroup = 3\n"), "run.toml:2: " + expected);
  EXPECT_EQ(refusal("[optimizer]\ngroup = [{params = \"a\"}, 3]\n"), "run.toml:2: " + expected);
  EXPECT_EQ(refusal(smallest, {"optimizer.group=a*"}), "--set optimizer.group=a*: " + expected);
  EXPECT_EQ(refusal(smallest, {"optimizer.group=[]\nx = 1"}), "--set optimizer.group=[]\nx = 1: " + expected);
  EXPECT_EQ(refusal("[[optimizer.group]]\n\nparms = \"a\"\n"),
            "run.toml:3: [[optimizer.group]] has no key 'parms'; did you mean 'params'?");
  EXPECT_EQ(refusal("[[optimizer.group]]\nlr = 1\n"),
            "run.toml:2: [[optimizer.group]] has no key 'lr'; it belongs to [optimizer]");
  EXPECT_EQ(refusal("[optimizer]\nlr_factor = 1\n"),
            "run.toml:2: [optimizer] has no key 'lr_factor'; it belongs to [[optimizer.group]]");
  EXPECT_EQ(refusal("[[optimizer.grup]]\n"), "run.toml:1: [optimizer] has no key 'grup'; did you mean 'group'?");
  EXPECT_EQ(refusal("[[optimizer.group]]\nlr_factor = -1\n"),
            "run.toml:2: [[optimizer.group]] lr_factor must be at least 0, not -1");
  EXPECT_EQ(refusal("[[optimizer.group]]\nparams = []\n"), "run.toml:2: [[optimizer.group]] params must not be empty");
  EXPECT_EQ(refusal(smallest, {"optimizer.group=[{weight_decay = true}]"}).substr(0, 56),
            "--set optimizer.group=[{weight_decay = true}]: [[optimiz");
}

TEST(Validate, KnowsTheModelsParameters) {
  const std::string group = smallest + "[[optimizer.group]]\nparams = \"*norm*\"\n[[optimizer.group]]\n";
  EXPECT_EQ(validate(load(group + "params = \"model.layers.[01].*\"\n"), 1).world(), 1);
  const auto unmatched = refusal_to_run(group + "params = [\"*\", \"model.layer.*\"]\n", 1);
  EXPECT_EQ(unmatched.substr(0, 79), "[[optimizer.group]] the pattern 'model.layer.*' matches no parameter of the mod");
  EXPECT_EQ(refusal_to_run(group + "lr_factor = 2\n", 1),
            "[[optimizer.group]] number 2 lacks params: which parameters are in it?");
}

TEST(Validate, NesterovNeedsMomentumUnderSgd) {
  const std::string sgd = smallest + "[optimizer]\nname = \"sgd\"\nnesterov = true\n";
  EXPECT_EQ(refusal_to_run(sgd, 1), "[optimizer] nesterov = true needs a momentum that is more than 0");
  EXPECT_EQ(refusal_to_run(sgd + "momentum = 0\n", 1),
            "[optimizer] nesterov = true needs a momentum that is more than 0");
  EXPECT_EQ(validate(load(sgd + "momentum = 0.1\n"), 1).world(), 1);
  EXPECT_EQ(validate(load(smallest, {"optimizer.name=muon", "optimizer.momentum=0"}), 1).world(), 1);
}

TEST(Validate, TheThreePhasesOfTheLearningRateFitIntoTheRun) {
  const auto phases = [](const std::string& warmup, const std::string& stable, const std::string& decay) {
    return smallest + "[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = " + warmup +
           "\nstable_steps = " + stable + "\ndecay_steps = " + decay + "\n";
  };
  EXPECT_EQ(validate(load(phases("3", "4", "3")), 1).world(), 1);
  EXPECT_EQ(validate(load(phases("3", "7", "0")), 1).world(), 1);
  EXPECT_EQ(refusal_to_run(phases("3", "4", "4"), 1),
            "[lr_scheduler] warmup_steps (3), stable_steps (4) and decay_steps (4) must not sum to more than "
            "[training] steps (10)");
  const std::string huge = "9223372036854775807";
  for (const auto& [stable, decay] : {std::pair(huge, huge), std::pair(std::string("8"), std::string("0"))}) {
    EXPECT_NE(refusal_to_run(phases("3", stable, decay), 1).find("must not sum to more"), std::string::npos);
  }
}

}  // namespace
}  // namespace fedshard::config
