#include "fedshard/model/hf_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "fedshard/base/error.h"

namespace fedshard::model {
namespace {

using base::DamagedError;
using base::Error;
using base::ExitStatus;
using base::UsageError;
using nlohmann::json;

json small() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_size", 64},
          {"intermediate_size", 112},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 8},
          {"num_key_value_heads", 2},
          {"vocab_size", 131}};
}

const json kLlama3 = {
    {"factor", 8.0}, {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};

Dims parse(const json& config) { return parse_hf_config(config.dump(), "config.json"); }

json with(json object, const json& keys) {
  object.update(keys);
  return object;
}

void expect_refused(const json& config, ExitStatus status, const std::string& text) {
  try {
    parse(config);
    ADD_FAILURE() << "accepted: " << config;
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), status) << e.what();
    EXPECT_EQ(std::string(e.what()).find("config.json"), 0u) << e.what();
    EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
  }
}

TEST(HfConfig, OptionalKeysHaveTransformersDefaults) {
  json config = small();
  config.erase("num_key_value_heads");
  config["head_dim"] = nullptr;
  const Dims dims = parse(config);
  EXPECT_EQ(dims.num_key_value_heads, 8);
  EXPECT_EQ(dims.head_size(), 8);
  EXPECT_EQ(dims.rms_norm_eps, 1e-6);
  EXPECT_EQ(dims.rope_theta, 10000.0);
  EXPECT_EQ(dims.max_position_embeddings, 2048);
  EXPECT_EQ(dims.initializer_range, 0.02);
  EXPECT_FALSE(dims.tie_word_embeddings);
  EXPECT_FALSE(dims.rope_scaling);
}

TEST(HfConfig, BothSpellingsOfTheRotaryParametersAreOne) {
  const json newer =
      with(small(), {{"rope_parameters", with(kLlama3, {{"rope_type", "llama3"}, {"rope_theta", 5e5}})}});
  const json older = with(small(), {{"rope_theta", 5e5}, {"rope_scaling", with(kLlama3, {{"rope_type", "llama3"}})}});
  const json oldest = with(small(), {{"rope_theta", 500000}, {"rope_scaling", with(kLlama3, {{"type", "llama3"}})}});
  const Dims dims = parse(newer);
  EXPECT_EQ(dims.rope_theta, 5e5);
  EXPECT_EQ(dims.rope_scaling, (RopeScaling{8.0, 1.0, 4.0, 8192}));
  EXPECT_EQ(parse(older), dims);
  EXPECT_EQ(parse(oldest), dims);
  EXPECT_EQ(parse(with(older, newer)), dims) << "both at once, saying the same";
}

TEST(HfConfig, PlainRotaryEmbeddingInEverySpelling) {
  for (const json& keys : {json{{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e6}}}},
                           json{{"rope_theta", 1e6}, {"rope_scaling", nullptr}}, json{{"rope_theta", 1e6}},
                           json{{"rope_parameters", {{"rope_theta", 1e6}}}, {"rope_theta", 1e6}}}) {
    const Dims dims = parse(with(small(), keys));
    EXPECT_EQ(dims.rope_theta, 1e6) << keys;
    EXPECT_FALSE(dims.rope_scaling) << keys;
  }
}

TEST(HfConfig, ContradictingSpellingsAreRefused) {
  const json older = with(small(), {{"rope_scaling", with(kLlama3, {{"rope_type", "llama3"}})}});
  expect_refused(with(older, {{"rope_parameters", {{"rope_type", "default"}}}}), ExitStatus::usage, "contradict");
  expect_refused(with(small(), {{"rope_theta", 1e4}, {"rope_parameters", {{"rope_theta", 5e5}}}}), ExitStatus::usage,
                 "rope_theta is 10000 at the top and 500000");
}

TEST(HfConfig, WhatIsNotComputedIsRefusedByName) {
  const auto usage = [](const json& keys, const std::string& text) {
    expect_refused(with(small(), keys), ExitStatus::usage, text);
  };
  usage({{"model_type", "mistral"}}, "model_type 'mistral'");
  usage({{"architectures", {"LlamaForSequenceClassification"}}}, "LlamaForSequenceClassification");
  usage({{"attention_bias", true}}, "attention_bias is true");
  usage({{"mlp_bias", true}}, "mlp_bias is true");
  usage({{"hidden_act", "gelu"}}, "hidden_act 'gelu'");
  usage({{"attention_dropout", 0.1}}, "attention_dropout is 0.1");
  usage({{"partial_rotary_factor", 0.5}}, "partial_rotary_factor is 0.5");
  usage({{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}}, "rope_type 'linear'");
  usage({{"rope_parameters", {{"rope_type", "yarn"}, {"factor", 2.0}}}}, "rope_type 'yarn'");
  usage({{"num_key_value_heads", 3}}, "num_key_value_heads 3");
  json nameless = small();
  nameless.erase("model_type");
  EXPECT_EQ(parse(nameless), parse(small()));
  nameless.erase("architectures");
  expect_refused(nameless, ExitStatus::usage, "neither model_type nor architectures");
}

TEST(HfConfig, DamageIsNamed) {
  for (const char* text : {"", "{", "[]", "null", "{\"hidden_size\": 64"}) {
    EXPECT_THROW(parse_hf_config(text, "config.json"), DamagedError) << text;
  }
  json config = small();
  config.erase("vocab_size");
  expect_refused(config, ExitStatus::damaged, "'vocab_size' is missing");
  expect_refused(with(small(), {{"hidden_size", "64"}}), ExitStatus::damaged,
                 "'hidden_size' is \"64\", not an integer");
  expect_refused(with(small(), {{"hidden_size", 64.5}}), ExitStatus::damaged, "'hidden_size' is 64.5");
  expect_refused(with(small(), {{"rms_norm_eps", "x"}}), ExitStatus::damaged, "'rms_norm_eps'");
  expect_refused(with(small(), {{"tie_word_embeddings", 1}}), ExitStatus::damaged, "not true or false");
  expect_refused(with(small(), {{"rope_scaling", 2}}), ExitStatus::damaged, "'rope_scaling' is 2, not an object");
  expect_refused(with(small(), {{"rope_scaling", {{"rope_type", "llama3"}}}}), ExitStatus::damaged,
                 "rope_scaling: 'factor' is missing");
}

TEST(HfConfig, DeepNestingIsRefused) {
  const auto nested = [](std::size_t depth) {
    return small().dump().insert(1, "\"x\":" + std::string(depth, '[') + std::string(depth, ']') + ",");
  };
  EXPECT_EQ(parse_hf_config(nested(64), "config.json").hidden_size, 64);
  for (const std::size_t depth : {std::size_t{65}, std::size_t{1} << 20}) {
    EXPECT_THROW(parse_hf_config(nested(depth), "config.json"), DamagedError) << depth;
  }
}

TEST(HfConfig, AMissingFileIsAUsageError) { EXPECT_THROW(read_hf_config("/nonexistent/config.json"), UsageError); }

}  // namespace
}  // namespace fedshard::model
