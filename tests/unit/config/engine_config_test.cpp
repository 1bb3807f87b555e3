// The keys of the sharded engine: [training] freeze, nonfinite and their kin, and optimizer.fused_backward.
#include <gtest/gtest.h>

#include "fedshard/config/config.h"
#include "tests/unit/config/config_text.h"

namespace fedshard::config {
namespace {

std::string with(const std::string& training, const std::string& optimizer = "") {
  return smallest + "[training]\n" + training + "[optimizer]\n" + optimizer;
}

TEST(Config, EngineKeysAreReadAndWrittenBack) {
  const Config config =
      load(with("reduce_each_micro_step = false\nnonfinite = \"skip\"\ndocument_mask = true\n"
                "activation_checkpoint = \"full\"\nfreeze = [\"*norm*\"]\n"));
  EXPECT_FALSE(config.training.reduce_each_micro_step);
  EXPECT_EQ(config.training.nonfinite, NonFinite::skip);
  EXPECT_EQ(config.training.activation_checkpoint, ActivationCheckpoint::full);
  EXPECT_TRUE(config.training.document_mask);
  EXPECT_EQ(config.training.freeze, std::vector<std::string>{"*norm*"});
  EXPECT_EQ(load(resolved_toml(config)), config);
}

TEST(Validate, FreezeKnowsTheModelsParameters) {
  EXPECT_EQ(validate(load(with("freeze = \"model.embed*\"\n")), 1).world(), 1);
  EXPECT_EQ(refusal_to_run(with("freeze = \"model.layer.*\"\n"), 1).substr(0, 75),
            "[training] freeze: the pattern 'model.layer.*' matches no parameter of the ");
  EXPECT_EQ(refusal_to_run(with("freeze = \"*\"\n"), 1),
            "[training] freeze: every parameter is frozen: there is nothing to train");
}

TEST(Validate, FusedBackwardIsRefusedWhereItCannotBeRight) {
  const std::string fused = "fused_backward = true\n";
  EXPECT_EQ(validate(load(with("max_norm = 0\n", fused)), 1).world(), 1);
  EXPECT_NE(refusal_to_run(with("", fused), 1).find("set [training] max_norm = 0"), std::string::npos);
  EXPECT_NE(refusal_to_run(with("max_norm = 0\ngradient_accumulation_steps = 2\n", fused), 1)
                .find("gradient_accumulation_steps = 2"),
            std::string::npos);
  EXPECT_NE(refusal_to_run(with("max_norm = 0\nnonfinite = \"skip\"\n", fused), 1).find("nonfinite = \"stop\""),
            std::string::npos);
}

}  // namespace
}  // namespace fedshard::config
