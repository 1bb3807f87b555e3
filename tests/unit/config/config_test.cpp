#include "fedshard/config/config.h"

#include <gtest/gtest.h>

#include "fedshard/config/options.h"
#include "tests/unit/config/config_text.h"

namespace fedshard::config {
namespace {

TEST(Config, DefaultsAreThoseOfTheContract) {
  const auto c = load(smallest);
  EXPECT_EQ(c.model.preset, "llama-tiny");
  EXPECT_EQ(c.data.train, std::vector<std::string>{"a.txt"});
  EXPECT_EQ(c.data.tokenizer, "byte");
  EXPECT_EQ(c.training.dtype, Dtype::bf16);
  EXPECT_EQ(c.training.reduce_dtype, Dtype::fp32);
  EXPECT_EQ(c.training.max_norm, 1.0);
  EXPECT_EQ(c.parallelism.groups, topology::NumberOrList(1));
  EXPECT_EQ(c.parallelism.data_parallel_shard_degree, topology::NumberOrList(-1));
  EXPECT_EQ(c.parallelism.data_parallel_replicate_degree, topology::NumberOrList(1));
  EXPECT_EQ(c.federation.weights, GroupWeights(WeightsBy::tokens));
  EXPECT_EQ(c.metrics.folder, "runs/run");
  EXPECT_FALSE(c.model.hidden_size.has_value());
  EXPECT_EQ(load("").model, ModelConfig{});  // an empty file is TOML; what it lacks is for validate to say
}

const char* const everything = R"(
[model]
hf = "models/tiny \"quoted\" \\ folder"
hidden_size = 64
intermediate_size = 172
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
vocab_size = 257
max_position_embeddings = 2048
rope_theta = 500000.0
rope_scaling = { rope_type = "llama3", factor = 8, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 8192 }
rms_norm_eps = 1e-5
initializer_range = 0.02
tie_word_embeddings = true
[data]
train = ["a/*.txt", "b.txt", "tab\there and ü"]
eval = "c.txt"
tokenizer = "tokenizer.json"
[training]
dtype = "fp32"
reduce_dtype = "bf16"
local_batch_size = 3
seq_len = 127
steps = 9007199254740993
gradient_accumulation_steps = 2
max_norm = 0
seed = 9223372036854775807
threads = 1
time_limit_s = 12.5
[optimizer]
name = "sgd"
lr = 0.1
momentum = 0.9
nesterov = true
weight_decay = 0.30000000000000004
[[optimizer.group]]
params = ["*norm*", "lm_head.weight"]
lr_factor = 0.5
[[optimizer.group]]
params = "*"
weight_decay = 0
[lr_scheduler]
warmup_steps = 5
decay = "linear"
stable_steps = 2
decay_steps = 7
min_lr_factor = 0.1
[parallelism]
groups = [2, 2]
data_parallel_shard_degree = [1, 2]
data_parallel_replicate_degree = -1
fsdp_reshard_after_forward = false
prefetch = 0
[federation]
every = 3
weights = "uniform"
[comm]
backend = "gloo"
timeout_s = 1
interface = "lo"
[validation]
interval = 4
steps = 2
[metrics]
folder = "runs/x"
interval = 10
progress = false
trace = true
)";

TEST(Config, ReadsEveryKeyAndComesBackEqualFromItsResolvedForm) {
  const auto c = load(everything);
  EXPECT_EQ(c.model.hf, "models/tiny \"quoted\" \\ folder");
  EXPECT_EQ(c.model.rope_scaling, (model::RopeScaling{8, 1, 4, 8192}));
  EXPECT_EQ(c.data.train, (std::vector<std::string>{"a/*.txt", "b.txt", "tab\there and ü"}));
  EXPECT_EQ(c.training.steps, 9007199254740993);  // beyond what a double holds
  EXPECT_EQ(c.training.seed, 9223372036854775807);
  EXPECT_EQ(c.optimizer.weight_decay, 0.30000000000000004);
  EXPECT_EQ(c.optimizer.groups,
            (std::vector<plan::ParameterGroup>{{{"*norm*", "lm_head.weight"}, 0.5, {}}, {{"*"}, 1, 0.0}}));
  EXPECT_EQ(c.parallelism.groups, topology::NumberOrList(std::vector{2, 2}));
  EXPECT_EQ(c.parallelism.data_parallel_shard_degree, topology::NumberOrList(std::vector{1, 2}));
  EXPECT_EQ(c.metrics.trace, true);
  EXPECT_EQ(load(resolved_toml(c)), c) << resolved_toml(c);
}

TEST(Config, ResolvedFormsOfVariantsComeBackEqual) {
  const std::vector<std::vector<std::string>> variants = {
      {},
      {"optimizer.name=sgd", "optimizer.momentum=0.5"},
      {"optimizer.name=muon", "lr_scheduler.stable_steps=3"},
      {"optimizer.group=[{params = 'a\\d*', weight_decay = 0.5}, {params = ['x', 'y'], lr_factor = 0}]"},
      {"lr_scheduler.decay=none"},
      {"optimizer.eps=5e-324", "optimizer.lr=3.4028234663852886e38"},
      {"data.train=[\"a\\u0000\\u007f\\u007fb\\u007f\\n'''\", \"\\\"\\\"\\\"\"]"},
      {"parallelism.groups=[7]"},
      {"metrics.folder=runs/ü"},
  };
  for (const auto& overrides : variants) {
    const auto c = load(smallest, overrides);
    EXPECT_EQ(load(resolved_toml(c)), c) << resolved_toml(c);
  }
  EXPECT_THROW(resolved_toml(load(smallest, {"metrics.folder=\xff"})), base::UsageError);
  // The run folder is named in the resolved form, so that it does not follow the name of that file.
  EXPECT_EQ(load_config(written(resolved_toml(load(smallest)), "config.toml")).metrics.folder, "runs/run");
}

TEST(Config, OverridesReplaceAndTheLastOneCounts) {
  const auto c = load(smallest, {"training.steps=7", "training.steps=9", "optimizer.name=sgd",
                                 "training.dtype=\"fp32\"", "data.train=[\"x\", \"y\"]", "optimizer.lr=1",
                                 "metrics.progress=false", "metrics.folder=runs/a=b", "parallelism.groups=[2,1]"});
  EXPECT_EQ(c.training.steps, 9);
  EXPECT_EQ(c.optimizer.name, OptimizerName::sgd);
  EXPECT_EQ(c.training.dtype, Dtype::fp32);
  EXPECT_EQ(c.data.train, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(c.optimizer.lr, 1.0);
  EXPECT_FALSE(c.metrics.progress);
  EXPECT_EQ(c.metrics.folder, "runs/a=b");
  EXPECT_EQ(c.parallelism.groups, topology::NumberOrList(std::vector{2, 1}));
}

TEST(Config, BareTextStandsForItselfWhereTextIsTaken) {
  EXPECT_EQ(load(smallest, {"data.train=2024"}).data.train, std::vector<std::string>{"2024"});
  EXPECT_EQ(load(smallest, {"metrics.folder=1979-05-27"}).metrics.folder, "1979-05-27");
  EXPECT_EQ(load(smallest, {"comm.interface="}).comm.interface, "");
  EXPECT_EQ(load(smallest, {"data.train=a b.txt\nx = 1"}).data.train, std::vector<std::string>{"a b.txt\nx = 1"});
  EXPECT_EQ(load(smallest, {"metrics.folder=true\nx = 1"}).metrics.folder, "true\nx = 1");
  EXPECT_EQ(load("[model]\n", {"model.hf=~/models/x"}).model.hf, "~/models/x");
  EXPECT_EQ(refusal(smallest, {"training.steps=many"}),
            "--set training.steps=many: [training] steps must be an integer, not the string \"many\"");
}

TEST(Config, UnknownNamesGetTheNearestKnownOne) {
  EXPECT_EQ(refusal("[training]\nstesp = 3\n"), "run.toml:2: [training] has no key 'stesp'; did you mean 'steps'?");
  EXPECT_EQ(refusal("[training]\nbatch_size = 3\n"),
            "run.toml:2: [training] has no key 'batch_size'; did you mean 'local_batch_size'?");
  EXPECT_EQ(refusal("[trainning]\nsteps = 3\n"), "run.toml:1: there is no table [trainning]; did you mean [training]?");
  EXPECT_EQ(
      refusal("\n[federation]\ngammas = 3\n"),
      "run.toml:3: [federation] has no key 'gammas'; its keys are every, start_step, prox_mu, weights, outer, "
      "outer_lr, "
      "outer_momentum, outer_beta1, outer_beta2, outer_tau, outer_max_norm, compress, block, top_k, scheme, bucket, "
      "concurrency, guard, "
      "inner_state, "
      "delay, mix, fragments, measures, include, exclude");
  EXPECT_EQ(refusal("[training]\nlr = 3\n"), "run.toml:2: [training] has no key 'lr'; it belongs to [optimizer]");
  EXPECT_EQ(refusal("steps = 3\n"),
            "run.toml:1: 'steps' is not a table but a key; it belongs to [training] or [validation]");
  EXPECT_EQ(refusal("training = 3\n"), "run.toml:1: 'training' is a table, write [training]");
  EXPECT_EQ(refusal("[[training]]\n"), "run.toml:1: 'training' is a table, write [training]");
  EXPECT_EQ(refusal("[xyzzy]\n").substr(0, 60), "run.toml:1: there is no table [xyzzy]; the tables are model,");
  EXPECT_EQ(refusal("[optimizer.adamw]\n"),
            "run.toml:1: [optimizer] has no key 'adamw'; its keys are name, lr, weight_decay, beta1, beta2, eps, "
            "momentum, nesterov, fused_backward, offload, group");
  EXPECT_EQ(refusal(smallest, {"optimizer.learning-rat=1"}).substr(0, 77),
            "--set optimizer.learning-rat=1: [optimizer] has no key 'learning-rat'; its ke");
  EXPECT_EQ(refusal(smallest, {"trainig.steps=1"}),
            "--set trainig.steps=1: there is no table [trainig]; did you mean [training]?");
}

TEST(Config, OverridesOfAnotherFormAreRefused) {
  for (const char* text : {"steps", "steps=3", "training.steps", "=", ".", "", "a=b.c"}) {
    EXPECT_EQ(refusal(smallest, {text}), fmt::format("--set {}: an override is written table.key=value", text));
  }
  EXPECT_NE(refusal(smallest, {".=1"}).find("there is no table []"), std::string::npos);
  EXPECT_NE(refusal(smallest, {"training.=1"}).find("[training] has no key ''"), std::string::npos);
  EXPECT_NE(refusal(smallest, {"model.rope_scaling.factor=1"}).find("no key 'rope_scaling.factor'"), std::string::npos);
}

TEST(Config, WrongTypesNameWhatWasExpectedAndFound) {
  EXPECT_EQ(refusal("[training]\n\nsteps = \"ten\"\n"),
            "run.toml:3: [training] steps must be an integer, not the string \"ten\"");
  EXPECT_EQ(refusal("[training]\nsteps = 1e3\n"),
            "run.toml:2: [training] steps must be an integer, not the float 1000.0");
  EXPECT_EQ(refusal("[training]\nmax_norm = true\n"),
            "run.toml:2: [training] max_norm must be a float, not the boolean true");
  EXPECT_EQ(refusal("[training]\ndtype = 16\n"),
            "run.toml:2: [training] dtype must be \"fp32\" or \"bf16\", not the integer 16");
  EXPECT_EQ(refusal("[training]\ndtype = \"fp16\"\n"),
            "run.toml:2: [training] dtype must be \"fp32\" or \"bf16\", not the string \"fp16\"");
  EXPECT_EQ(refusal("[metrics]\nprogress = 1\n"),
            "run.toml:2: [metrics] progress must be true or false, not the integer 1");
  EXPECT_EQ(refusal("[data]\ntrain = 3\n"),
            "run.toml:2: [data] train must be a string or a list of strings, not the integer 3");
  EXPECT_EQ(refusal("[data]\ntrain = [\"a\", 3]\n"),
            "run.toml:2: [data] train must be a string or a list of strings, not the integer 3");
  EXPECT_EQ(refusal("[data]\ntokenizer = [\"a\"]\n"), "run.toml:2: [data] tokenizer must be a string, not a list");
  EXPECT_EQ(refusal("[parallelism]\ngroups = \"auto\"\n"),
            "run.toml:2: [parallelism] groups must be an integer or a list of integers, not the string \"auto\"");
  EXPECT_EQ(refusal("[training]\nsteps = 1979-05-27\n"),
            "run.toml:2: [training] steps must be an integer, not a date or time");
  EXPECT_EQ(refusal("[training.steps]\n"), "run.toml:1: [training] steps must be an integer, not a table");
}

TEST(Config, ValuesOutOfRangeNameTheRange) {
  EXPECT_EQ(refusal("[training]\nsteps = 0\n"), "run.toml:2: [training] steps must be at least 1, not 0");
  EXPECT_EQ(refusal("[training]\nmax_norm = -0.5\n"), "run.toml:2: [training] max_norm must be at least 0, not -0.5");
  EXPECT_EQ(refusal("[optimizer]\nlr = nan\n"), "run.toml:2: [optimizer] lr must be a finite number, not nan");
  EXPECT_EQ(refusal("[optimizer]\nlr = inf\n"), "run.toml:2: [optimizer] lr must be a finite number, not inf");
  EXPECT_EQ(refusal("[federation]\nprox_mu = 1e300\n"),
            "run.toml:2: [federation] prox_mu must be within the range of fp32, up to 3.4e+38, and not 1e+300");
  EXPECT_EQ(refusal("[optimizer]\nbeta1 = 1\n"),
            "run.toml:2: [optimizer] beta1 must be at least 0 and less than 1, not 1");
  EXPECT_EQ(refusal("[lr_scheduler]\nmin_lr_factor = 1.5\n"),
            "run.toml:2: [lr_scheduler] min_lr_factor must be at least 0 and at most 1, not 1.5");
  EXPECT_EQ(refusal("[comm]\ntimeout_s = 0\n"),
            "run.toml:2: [comm] timeout_s must be at least 0.1 and at most 604800, not 0");
  EXPECT_EQ(refusal("[parallelism]\nprefetch = 3\n"),
            "run.toml:2: [parallelism] prefetch must be at least 0 and at most 2, not 3");
  EXPECT_EQ(refusal("[parallelism]\ngroups = [2, 0]\n"), "run.toml:2: [parallelism] groups must be at least 1, not 0");
  EXPECT_EQ(refusal("[parallelism]\ngroups = []\n"), "run.toml:2: [parallelism] groups must not be an empty list");
  EXPECT_EQ(refusal("[parallelism]\ngroups = 4294967297\n"),
            "run.toml:2: [parallelism] groups must be at most 2147483647, not 4294967297");
  EXPECT_EQ(refusal("[data]\ntrain = []\n"), "run.toml:2: [data] train must not be empty");
  EXPECT_EQ(refusal("[data]\ntrain = [\"\"]\n"), "run.toml:2: [data] train must not be empty");
  EXPECT_EQ(refusal("[data]\ntokenizer = \"\"\n"), "run.toml:2: [data] tokenizer must not be empty");
  EXPECT_EQ(load("[comm]\ntimeout_s = 0.1\n").comm.timeout_s, 0.1);
  EXPECT_EQ(load("[optimizer]\nbeta1 = 0.9999999\n").optimizer.beta1, 0.9999999);
}

TEST(Config, RopeScalingIsCompleteAndOfTheKnownKind) {
  const auto with = [](const std::string& inside) { return "[model]\nrope_scaling = {" + inside + "}\n"; };
  const std::string rest = ", low_freq_factor = 1, high_freq_factor = 4, original_max_position_embeddings = 8192";
  EXPECT_EQ(load(with("rope_type = \"llama3\", factor = 8" + rest)).model.rope_scaling->factor, 8.0);
  EXPECT_EQ(refusal(with("rope_type = \"yarn\", factor = 8" + rest)),
            "run.toml:2: [model] rope_scaling.rope_type must be \"llama3\", not the string \"yarn\"");
  EXPECT_EQ(refusal(with("rope_type = \"llama3\"" + rest)), "run.toml:2: [model] rope_scaling lacks 'factor'");
  EXPECT_EQ(refusal(with("rope_type = \"llama3\", factor = 0.5" + rest)),
            "run.toml:2: [model] rope_scaling.factor must be at least 1, not 0.5");
  EXPECT_EQ(refusal(with("factors = 8")).substr(0, 53), "run.toml:2: [model] rope_scaling has no key 'factors'");
  EXPECT_EQ(refusal("[model]\nrope_scaling = 8\n").substr(0, 46), "run.toml:2: [model] rope_scaling must be a tab");
  EXPECT_EQ(refusal(with("rope_type = \"llama3\", factor = 8, low_freq_factor = 4, high_freq_factor = 4, "
                         "original_max_position_embeddings = 1")),
            "run.toml:2: [model] rope_scaling: high_freq_factor (4) must be more than low_freq_factor (4)");
}

TEST(Config, KeysWithoutMeaningBesideOthersAreRefused) {
  EXPECT_EQ(refusal("[optimizer]\nname = \"sgd\"\nbeta1 = 0.9\n"),
            "run.toml:3: [optimizer] beta1 has a meaning only with name = \"adamw\" or \"muon\"; remove it");
  EXPECT_EQ(refusal("[optimizer]\nmomentum = 0.9\n"),
            "run.toml:2: [optimizer] momentum has a meaning only with name = \"sgd\" or \"muon\"; remove it");
  EXPECT_EQ(refusal("[optimizer]\neps = 1e-8\n", {"optimizer.name=sgd"}),
            "run.toml:2: [optimizer] eps has a meaning only with name = \"adamw\" or \"muon\"; remove it");
  EXPECT_EQ(
      refusal("[lr_scheduler]\ndecay = \"none\"\ndecay_steps = 3\n"),
      "run.toml:3: [lr_scheduler] decay_steps has a meaning only with decay = \"cosine\" or \"linear\"; remove it");
}

TEST(Config, WhatIsNotTomlNamesFileLineAndColumn) {
  EXPECT_EQ(refusal("[training]\nsteps = \n").substr(0, 12), "run.toml:2:9");
  const auto twice = refusal("[training]\nsteps = 1\nsteps = 2\n");
  EXPECT_EQ(twice.substr(0, 10), "run.toml:3");
  EXPECT_NE(twice.find("'steps'"), std::string::npos) << twice;
  const auto table_twice = refusal("[training]\nsteps = 1\n[training]\nseed = 2\n");
  EXPECT_EQ(table_twice.substr(0, 10), "run.toml:3");
  EXPECT_EQ(refusal("[training]\nseq_len = \"\xff\"\n").substr(0, 10), "run.toml:2");
  const auto missing = refusal_of([] { load_config("/nowhere/at/all.toml"); });
  EXPECT_EQ(missing, "/nowhere/at/all.toml: cannot open: No such file or directory");
}

TEST(Validate, GivesTheLayout) {
  const auto layout = validate(load(smallest, {"parallelism.groups=2", "parallelism.data_parallel_shard_degree=2",
                                               "parallelism.data_parallel_replicate_degree=-1"}),
                               8);
  EXPECT_EQ(layout.strategy(), "fl+hsdp");
  EXPECT_EQ(validate(load(smallest), 1).world(), 1);
}

TEST(Validate, RefusesModelsThatDoNotExistOrDoNotFit) {
  const auto unknown = refusal_to_run("[model]\npreset = \"llama\"\n[data]\ntrain = \"a\"\n", 1);
  EXPECT_NE(unknown.find("llama-tiny"), std::string::npos) << unknown;
  const auto heads =
      refusal_to_run("[data]\ntrain = \"a\"\n[model]\npreset = \"llama-tiny\"\nnum_attention_heads = 7\n", 1);
  EXPECT_NE(heads.find("num_attention_heads"), std::string::npos) << heads;
  EXPECT_EQ(
      refusal_to_run("[model]\npreset = \"llama-tiny\"\nmax_position_embeddings = 511\n[data]\ntrain = \"a\"\n", 1),
      "[training] seq_len (512) must not be more than the model's max_position_embeddings (511); set [model] "
      "max_position_embeddings to train on longer sequences");
  const auto missing = refusal_to_run("[model]\nhf = \"/nowhere\"\n", 1);
  EXPECT_EQ(missing.substr(0, 20), "/nowhere/config.json") << missing;
}

TEST(ModelDims, AreThePresetsWithWhatOverridesThem) {
  EXPECT_EQ(dims_of(load(smallest).model), model::preset("llama-tiny"));
  auto expected = model::preset("llama3.1-8b");
  expected.hidden_size = 64;
  expected.intermediate_size = 172;
  expected.num_hidden_layers = 2;
  expected.num_attention_heads = 4;
  expected.num_key_value_heads = 2;
  expected.head_dim = 16;
  expected.vocab_size = 257;
  expected.max_position_embeddings = 2048;
  expected.rope_theta = 1e4;
  expected.rope_scaling = model::RopeScaling{4, 1, 2, 512};
  expected.rms_norm_eps = 1e-6;
  expected.initializer_range = 0.01;
  expected.tie_word_embeddings = true;
  EXPECT_EQ(dims_of(load(R"([model]
preset = "llama3.1-8b"
hidden_size = 64
intermediate_size = 172
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
vocab_size = 257
max_position_embeddings = 2048
rope_theta = 10000
rope_scaling = { rope_type = "llama3", factor = 4, low_freq_factor = 1, high_freq_factor = 2, original_max_position_embeddings = 512 }
rms_norm_eps = 1e-6
initializer_range = 0.01
tie_word_embeddings = true
)")
                        .model),
            expected);
}

TEST(ModelDims, OfAHuggingFaceFolderComeFromItsConfig) {
  written(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
              "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"})",
          "config.json");
  ModelConfig config;
  config.hf = written("").parent_path().string();
  config.vocab_size = 600;
  const auto dims = dims_of(config);
  EXPECT_EQ(dims.hidden_size, 64);
  EXPECT_EQ(dims.vocab_size, 600);
}

TEST(Validate, RefusesLayoutsByNamingBothNumbers) {
  EXPECT_EQ(refusal_to_run(smallest + "[parallelism]\ngroups = [2, 2]\n", 5),
            "[parallelism] 5 ranks cannot be split into groups of 2 and 2 (sum 4)");
  EXPECT_EQ(validate(load(smallest + "[parallelism]\ngroups = [3, 2]\n"), 5).describe(),
            "fl+fsdp: 5 ranks = 2 groups of 3 (1 replica x 3 shards), 2 (1 replica x 2 shards)");
}

TEST(Validate, OffloadsOnGpusAlone) {
  const std::string offloaded = smallest + "[optimizer]\noffload = true\n";
  EXPECT_EQ(refusal_to_run(offloaded, 1),
            "[optimizer] offload keeps the moments in the host's memory, where ranks that compute on CPUs have them "
            "anyway; it needs [comm] backend = \"nccl\"");
  EXPECT_EQ(refusal_to_run(offloaded + "name = \"sgd\"\n[comm]\nbackend = \"nccl\"\n", 1),
            "[optimizer] offload keeps the moments in the host's memory, but sgd without momentum has none");
  // In any build, so that a run on GPUs can be tried dry where there are none.
  EXPECT_EQ(validate(load(offloaded + "[comm]\nbackend = \"nccl\"\n"), 1).world(), 1);
}

TEST(Warnings, AreForBf16MastersAlone) {
  EXPECT_EQ(warnings_of(load(smallest)), std::vector<std::string>{});
  EXPECT_EQ(warnings_of(load(smallest, {"training.master_dtype=bf16"})).size(), 1u);
}

TEST(Validate, NeedsOneModelDataAndAWarmUpWithinTheRun) {
  EXPECT_EQ(refusal_to_run("[data]\ntrain = \"a\"\n", 1), "[model] needs preset or hf: which model is trained?");
  EXPECT_EQ(refusal_to_run("[model]\npreset = \"a\"\nhf = \"b\"\n", 1),
            "[model] has both preset = \"a\" and hf = \"b\"; give one of them");
  EXPECT_EQ(refusal_to_run("[model]\npreset = \"llama-tiny\"\n", 1), "[data] train is missing: what is trained on?");
  EXPECT_EQ(refusal_to_run(smallest + "[validation]\ninterval = 3\n", 1),
            "[validation] is set, but [data] eval is missing: what is evaluated on?");
  EXPECT_EQ(refusal_to_run(smallest + "[training]\nsteps = 3\n[lr_scheduler]\nwarmup_steps = 4\n", 1),
            "[lr_scheduler] warmup_steps (4) must not be more than [training] steps (3)");
  EXPECT_EQ(validate(load(smallest + "[training]\nsteps = 3\n[lr_scheduler]\nwarmup_steps = 3\n"), 1).world(), 1);
}

}  // namespace
}  // namespace fedshard::config
