// What [federation] is told: weights, outer optimizers, compression.
#include "fedshard/config/config.h"

#include <gtest/gtest.h>

#include "fedshard/config/options.h"
#include "tests/unit/config/config_text.h"

namespace fedshard::config {
namespace {

TEST(Federation, WeightsAreAWordOrAListByGroup) {
  const auto weights = [](const std::string& text) { return smallest + "[federation]\nweights = " + text + "\n"; };
  const std::string groups = "[parallelism]\ngroups = 2\n";
  EXPECT_EQ(load(weights("[0, 2.5]")).federation.weights, GroupWeights(std::vector<double>{0, 2.5}));
  EXPECT_EQ(load(weights("\"uniform\"")).federation.weights, GroupWeights(WeightsBy::uniform));
  const Config list = load(weights("[1, 2]") + groups);
  EXPECT_EQ(validate(list, 2).groups(), 2);
  EXPECT_EQ(load(resolved_toml(list)), list);
  EXPECT_EQ(refusal_to_run(weights("[1, 2, 3]") + groups, 2),
            "[federation] weights has 3 numbers, but the number of groups is 2; give one for each");
  EXPECT_EQ(refusal_to_run(weights("[0, 0]") + groups, 2),
            "[federation] weights are all 0; at least one group must count");
  EXPECT_NE(refusal_to_run(smallest + "[federation]\nguard = 0.5\n", 1).find("must be 0 or at least 1"),
            std::string::npos);
  EXPECT_NE(refusal(weights("3")).find("a string or a list of numbers"), std::string::npos);
  for (const char* bad : {"[1, -1]", "[1, nan]", "[1, inf]", "[\"tokens\"]", "3", "\"token\"", "[[1]]"}) {
    EXPECT_NE(refusal(weights(bad) + groups).find("[federation] weights"), std::string::npos) << bad;
  }
}

TEST(Federation, TheOuterOptimizersNumbersAreItsOwn) {
  const auto outer = [](const std::string& text) { return smallest + "[federation]\nouter = " + text + "\n"; };
  EXPECT_EQ(outer_options(load(smallest).federation), plan::usual_options(plan::Outer::fedavg));
  for (const auto& [name, which] : {std::pair{"nesterov", plan::Outer::nesterov},
                                    {"fedadam", plan::Outer::fedadam},
                                    {"fedadagrad", plan::Outer::fedadagrad},
                                    {"fedyogi", plan::Outer::fedyogi},
                                    {"fedavgm", plan::Outer::fedavgm}}) {
    const Config config = load(outer("\"" + std::string(name) + "\""));
    EXPECT_EQ(outer_options(config.federation), plan::usual_options(which)) << name;
    EXPECT_EQ(load(resolved_toml(config)), config) << name;
  }
  const auto set = outer_options(load(outer("\"fedyogi\"\nouter_lr = 0.5\nouter_beta1 = 0\nouter_beta2 = 0.5\n"
                                            "outer_tau = 1\nouter_max_norm = 2"))
                                     .federation);
  EXPECT_EQ(set, (plan::OuterOptions{plan::Outer::fedyogi, 0.5, 0.9, 0, 0.5, 1, 2}));
  EXPECT_NE(refusal(outer("\"nesterov\"\nouter_beta1 = 0.5")).find("has a meaning only with outer ="),
            std::string::npos);
  EXPECT_NE(refusal(outer("\"fedadam\"\nouter_momentum = 0.5")).find("has a meaning only with"), std::string::npos);
  EXPECT_NE(refusal(outer("\"fedadagrad\"\nouter_beta2 = 0.5")).find("has a meaning only with"), std::string::npos);
}

TEST(Federation, TheWarmUpEndsWithinTheRunAndStepsWholeGradients) {
  const auto start = [](const std::string& text) { return smallest + "[federation]\nstart_step = " + text + "\n"; };
  const auto with = [](const std::string& text) { return load(smallest + text + "[parallelism]\ngroups = 2\n"); };
  EXPECT_EQ(load(smallest).federation.start_step, 0);
  EXPECT_EQ(validate(with("[federation]\nstart_step = 7\n[training]\nsteps = 7\n"), 2).groups(), 2);
  EXPECT_EQ(refusal_to_run(start("8") + "[training]\nsteps = 7\n", 2),
            "[federation] start_step (8) must not be more than [training] steps (7)");
  const std::string fused = "[optimizer]\nfused_backward = true\n[training]\nmax_norm = 0\n";
  EXPECT_EQ(refusal_to_run(start("1") + fused, 2),
            "[optimizer] fused_backward updates units before the whole gradient is there, so it cannot be summed over "
            "the groups: set [federation] start_step = 0");
  EXPECT_EQ(validate(load(start("0") + fused), 2).world(), 2);
  EXPECT_NE(refusal(start("-1")).find("at least 0"), std::string::npos);
  EXPECT_NE(refusal(start("1.5")).find("[federation] start_step"), std::string::npos);
}

TEST(Federation, ARoundIsStepsAListOfThemTokensOrTime) {
  using By = plan::Pace::By;
  const auto every = [](const std::string& text) { return smallest + "[federation]\nevery = " + text + "\n"; };
  const std::string groups = "[parallelism]\ngroups = 2\n[training]\nsteps = 12\n";
  EXPECT_EQ(load(smallest).federation.every, plan::Pace::of_steps(8));
  for (const auto& [text, pace] :
       std::vector<std::pair<std::string, plan::Pace>>{{"3", plan::Pace::of_steps(3)},
                                                       {"[4, 2]", {.by = By::group_steps, .by_group = {4, 2}}},
                                                       {"\"1M tokens\"", {.by = By::tokens, .count = 1'000'000}},
                                                       {"\"0.1s\"", {.by = By::seconds, .seconds = 0.1}},
                                                       {"\"10m\"", {.by = By::seconds, .seconds = 600}}}) {
    const Config config = load(every(text) + groups);
    EXPECT_EQ(config.federation.every, pace) << text;
    EXPECT_EQ(load(resolved_toml(config)), config) << text;
    EXPECT_EQ(validate(config, 2).groups(), 2) << text;
  }
  // Bare on the command line, too.
  EXPECT_EQ(load(smallest, {"federation.every=30s"}).federation.every.seconds, 30);
  EXPECT_EQ(load(smallest, {"federation.every=5 k tokens"}).federation.every.count, 5000);
  EXPECT_EQ(load(smallest, {"federation.every=[1,2]"}).federation.every.by_group, (std::vector<std::int64_t>{1, 2}));
  for (const char* bad : {"0", "-1", "1.5", "[0, 1]", "[]", "[1, 2.5]", "true", "\"\"", "\"8\"", "\"8 steps\""}) {
    EXPECT_NE(refusal(every(bad)).find("[federation] every"), std::string::npos) << bad;
  }
  EXPECT_EQ(
      refusal_to_run(every("[4, 2, 1]") + groups, 2),
      "[federation] every has 3 numbers, but the number of groups is 2; give one for each, or one without brackets");
  EXPECT_EQ(
      refusal_to_run(every("[5, 2]") + groups, 2),
      "[federation] every = [5, 2]: the 12 steps after the warm-up (all, without start_step) must be a multiple of "
      "5, the most that a group makes in a round, so that the run ends with a round");
  EXPECT_EQ(validate(load(every("[5, 2]") + "start_step = 2\n" + groups), 2).groups(), 2);
  EXPECT_EQ(
      refusal_to_run(every("\"9s\"") + "delay = 2\n" + groups, 2),
      "[federation] every = 9s lets groups make unlike numbers of steps in a round, but delay = 2 counts on steps "
      "that all groups share: set delay = 0, or every to one number of steps");
  EXPECT_NE(refusal_to_run(every("[4, 2]") + "fragments = 2\n" + groups, 2).find("fragments = 2 counts on steps"),
            std::string::npos);
  // A list of equal numbers is one number.
  EXPECT_EQ(validate(load(every("[5, 5]") + "delay = 2\nfragments = 2\n" + groups), 2).groups(), 2);
}

TEST(Federation, TheProximalTermHasAFactor) {
  const auto mu = [](const std::string& text) { return smallest + "[federation]\nprox_mu = " + text + "\n"; };
  EXPECT_EQ(load(smallest).federation.prox_mu, 0);
  EXPECT_EQ(load(mu("0.25")).federation.prox_mu, 0.25);
  const Config fused = load(mu("1") + "[optimizer]\nfused_backward = true\n[training]\nmax_norm = 0\n");
  EXPECT_EQ(validate(fused, 2).world(), 2);
  for (const char* bad : {"-0.1", "nan", "inf", "\"much\""}) {
    EXPECT_NE(refusal(mu(bad)).find("[federation] prox_mu"), std::string::npos) << bad;
  }
}

TEST(Federation, CompressionHasItsUsualBlocks) {
  using Kind = plan::Compression::Kind;
  const auto compress = [](const std::string& text) { return smallest + "[federation]\ncompress = " + text + "\n"; };
  EXPECT_EQ(compression_of(load(smallest).federation), plan::Compression{});
  for (const auto& [name, kind] :
       {std::pair{"bf16", Kind::bf16}, {"int8", Kind::int8}, {"int4", Kind::int4}, {"topk", Kind::topk}}) {
    const Config config = load(compress("\"" + std::string(name) + "\""));
    EXPECT_EQ(compression_of(config.federation), plan::usual_compression(kind)) << name;
    EXPECT_EQ(load(resolved_toml(config)), config) << name;
  }
  EXPECT_EQ(compression_of(load(compress("\"topk\"\nblock = 100\ntop_k = 7")).federation),
            (plan::Compression{Kind::topk, 100, 7}));
  EXPECT_NE(refusal(compress("\"bf16\"\nblock = 8")).find("has a meaning only with"), std::string::npos);
  EXPECT_NE(refusal(compress("\"int8\"\ntop_k = 8")).find("has a meaning only with"), std::string::npos);
  EXPECT_NE(refusal(compress("\"int8\"\nblock = 0")).find("at least 1"), std::string::npos);
  EXPECT_EQ(refusal_to_run(compress("\"topk\"\nblock = 8"), 1),
            "[federation] top_k (64) must not be more than block (8)");
}

TEST(Federation, ReplicasShareAnExchangeByAScheme) {
  const auto scheme = [](const std::string& text) { return smallest + "[federation]\nscheme = " + text + "\n"; };
  EXPECT_EQ(exchange_rules(load(smallest).federation), topology::ExchangeRules{});
  EXPECT_EQ(load(scheme("\"leader\"")).federation.scheme, topology::Scheme::leader);
  const std::string unequal =
      "[parallelism]\ngroups = [4, 2]\ndata_parallel_shard_degree = 2\n"
      "data_parallel_replicate_degree = -1\n";
  EXPECT_EQ(validate(load(scheme("\"leader\"") + unequal), 6).groups(), 2);
  EXPECT_EQ(
      refusal_to_run(scheme("\"naive\"") + unequal, 6),
      "[federation] scheme = \"naive\" pairs the replicas of all groups, but group 0 has 2 and group 1 has 1; take "
      "\"split\" or \"leader\"");
  EXPECT_NE(refusal(scheme("\"ring\"")).find("\"split\" or \"leader\" or \"naive\""), std::string::npos);
}

TEST(Federation, AnExchangeGoesInBuckets) {
  using topology::Buckets;
  const auto bucket = [](const std::string& text) { return smallest + "[federation]\nbucket = " + text + "\n"; };
  EXPECT_EQ(load(bucket("\"unit\"")).federation.bucket, Buckets{Buckets::By::unit});
  const Config config = load(bucket("\"2MiB\"\nconcurrency = 5\nscheme = \"naive\""));
  EXPECT_EQ(exchange_rules(config.federation),
            (topology::ExchangeRules{topology::Scheme::naive, {Buckets::By::size, 1 << 19}, 5}));
  EXPECT_EQ(load(resolved_toml(config)), config);
  EXPECT_EQ(load(smallest, {"federation.bucket=64KiB"}).federation.bucket.numel, 1 << 14);
  EXPECT_NE(refusal(bucket("\"2MB\"")).find("[federation] bucket: a bucket is \"whole\""), std::string::npos);
  EXPECT_NE(refusal(bucket("25")).find("[federation] bucket"), std::string::npos);
  EXPECT_NE(refusal(bucket("\"unit\"\nconcurrency = 0")).find("at least 1"), std::string::npos);
  EXPECT_NE(refusal(bucket("\"whole\"\nconcurrency = 2")).find("has a meaning only with bucket"), std::string::npos);
}

TEST(Federation, PatternsChooseWhatRoundsExchange) {
  const auto of_two = [](const std::string& keys) {
    return smallest + "[parallelism]\ngroups = 2\n[federation]\n" + keys + "\n";
  };
  EXPECT_EQ(load(smallest).federation.include, std::vector<std::string>{});
  const Config config = load(of_two("include = \"model.*\"\nexclude = [\"*norm*\", \"model.embed*\"]"));
  EXPECT_EQ(config.federation.include, std::vector<std::string>{"model.*"});
  EXPECT_EQ(config.federation.exclude, (std::vector<std::string>{"*norm*", "model.embed*"}));
  EXPECT_EQ(load(resolved_toml(config)), config);
  EXPECT_EQ(validate(config, 2).groups(), 2);
  for (const int groups : {1, 2}) {  // a pattern is wrong whether or not there are rounds
    const auto refused = [&](const std::string& keys) {
      return refusal_to_run(smallest + "[parallelism]\ngroups = " + std::to_string(groups) + "\n[federation]\n" + keys,
                            2);
    };
    EXPECT_EQ(refused("include = [\"model.*\", \"lm_hat*\"]\n").substr(0, 89),
              "[federation] include and exclude: the pattern 'lm_hat*' matches no parameter of the model");
    EXPECT_EQ(refused("exclude = \"model.layer.*\"\n").substr(0, 96),
              "[federation] include and exclude: the pattern 'model.layer.*' matches no parameter of the model;");
    EXPECT_EQ(refused("exclude = \"*\"\n"),
              "[federation] include and exclude: no parameter that trains is left for rounds to exchange");
    EXPECT_EQ(refused("include = \"*norm*\"\n[training]\nfreeze = \"*norm*\"\n"),
              "[federation] include and exclude: no parameter that trains is left for rounds to exchange");
  }
}

}  // namespace
}  // namespace fedshard::config
