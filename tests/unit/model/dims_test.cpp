#include "fedshard/model/dims.h"

#include <gtest/gtest.h>

#include <limits>

#include "fedshard/base/error.h"
#include "fedshard/model/names.h"

namespace fedshard::model {
namespace {

using base::UsageError;

// The text of the UsageError that validate() throws, or "" where it throws none.
std::string complaint(const Dims& dims) {
  try {
    dims.validate();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

void expect_complaint(const Dims& dims, const std::string& part) {
  EXPECT_NE(complaint(dims).find(part), std::string::npos) << part << " in: " << complaint(dims);
}

TEST(Dims, PresetsHaveThePublishedParameterCounts) {
  EXPECT_EQ(preset("llama3.1-8b").parameter_count(), 8'030'261'248);
  EXPECT_EQ(preset("llama3.1-70b").parameter_count(), 70'553'706'496);
  EXPECT_EQ(preset("llama3.2-1b").parameter_count(), 1'235'814'400);
  EXPECT_EQ(preset("llama-60m").parameter_count(), 58'073'600);
  EXPECT_EQ(preset("llama-tiny").parameter_count(), 467'808);
}

TEST(Dims, EveryPresetIsValidAndFitsTheByteTokenizer) {
  for (const std::string& name : preset_names()) {
    EXPECT_EQ(complaint(preset(name)), "") << name;
    EXPECT_GE(preset(name).vocab_size, 257) << name;
  }
}

TEST(Dims, AnUnknownPresetIsAnsweredWithTheList) {
  try {
    preset("llama-3-8b");
    FAIL() << "an unknown preset was accepted";
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(),
                 "there is no model preset 'llama-3-8b'; the presets are llama-tiny, llama-60m, llama3.2-1b, "
                 "llama3.1-8b, llama3.1-70b");
  }
}

TEST(Dims, HeadSizeFollowsHiddenSizeUntilItIsSet) {
  Dims dims = preset("llama-tiny");
  EXPECT_EQ(dims.head_size(), 24);
  dims.hidden_size = 128;
  EXPECT_EQ(dims.head_size(), 32);
  dims.head_dim = 10;
  EXPECT_EQ(dims.query_size(), 40);
  EXPECT_EQ(dims.key_value_size(), 20);
}

TEST(Dims, FlopsFollowTheClosedForm) {
  Dims dims = preset("llama-tiny");
  // By hand: a block has 96*96*2 + 96*48*2 + 3*96*256 = 101,376 matrix elements; the head 320*96 = 30,720.
  EXPECT_EQ(dims.matmul_parameter_count(), 4 * 101'376 + 30'720);
  EXPECT_DOUBLE_EQ(dims.forward_flops_per_token(100), 2.0 * 436'224 + 4.0 * 4 * 96 * 100);
  EXPECT_DOUBLE_EQ(dims.training_flops_per_token(100), 6.0 * 436'224 + 12.0 * 4 * 96 * 100);
  const std::int64_t untied = dims.parameter_count();
  dims.tie_word_embeddings = true;
  EXPECT_EQ(dims.matmul_parameter_count(), 436'224) << "a tied head computes as much as an untied one";
  EXPECT_EQ(dims.parameter_count(), untied - 320 * 96);
}

TEST(Dims, ImpossibleSizesAreRefusedWithBothNumbers) {
  Dims dims = preset("llama-tiny");
  dims.hidden_size = 97;
  expect_complaint(dims, "hidden_size 97");
  expect_complaint(dims, "num_attention_heads 4");
  dims = preset("llama-tiny");
  dims.num_key_value_heads = 3;
  expect_complaint(dims, "num_attention_heads 4");
  expect_complaint(dims, "num_key_value_heads 3");
  dims = preset("llama-tiny");
  dims.head_dim = 7;
  expect_complaint(dims, "even head_dim, not 7");
  dims = preset("llama3.1-8b");
  dims.rope_scaling->high_freq_factor = 1.0;
  expect_complaint(dims, "high_freq_factor 1");
  expect_complaint(dims, "low_freq_factor 1");
  dims.rope_scaling->high_freq_factor = 4.0;
  dims.rope_scaling->factor = 0.5;
  expect_complaint(dims, "factor is 0.5");
}

TEST(Dims, SizesOutOfRangeAreRefusedByName) {
  for (std::int64_t Dims::*size :
       {&Dims::hidden_size, &Dims::intermediate_size, &Dims::num_hidden_layers, &Dims::num_attention_heads,
        &Dims::num_key_value_heads, &Dims::vocab_size, &Dims::max_position_embeddings}) {
    for (const std::int64_t value : {std::int64_t{0}, std::int64_t{-8}, std::numeric_limits<std::int64_t>::max()}) {
      Dims dims = preset("llama-tiny");
      dims.*size = value;
      expect_complaint(dims, fmt::format("is {}; it must be at", value));
    }
  }
  for (double Dims::*number : {&Dims::rope_theta, &Dims::rms_norm_eps}) {
    for (const double value :
         {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      Dims dims = preset("llama-tiny");
      dims.*number = value;
      expect_complaint(dims, "it must be positive");
    }
  }
}

TEST(Dims, SizesWhoseTotalsDoNotFitAreRefused) {
  Dims dims = preset("llama-tiny");
  dims.num_hidden_layers = std::int64_t{1} << 16;
  dims.intermediate_size = dims.vocab_size = std::int64_t{1} << 28;
  expect_complaint(dims, "its sizes make 5.1e+15 parameters; there must be at most 1.8e+13");
  dims = preset("llama-tiny");
  dims.num_attention_heads = dims.head_dim = std::int64_t{1} << 28;
  expect_complaint(dims, "parameters; there must be at most");
  dims = preset("llama-tiny");
  dims.num_hidden_layers = std::int64_t{1} << 16;
  EXPECT_EQ(complaint(dims), "");
  EXPECT_EQ(dims.matmul_parameter_count(), (std::int64_t{1} << 16) * 101'376 + 30'720);
  ++dims.num_hidden_layers;
  expect_complaint(dims, "model: num_hidden_layers is 65537; it must be at most 65536");
}

TEST(Names, AreHuggingFaces) {
  EXPECT_EQ(block_parameter(11, kGateProjection), "model.layers.11.mlp.gate_proj.weight");
  EXPECT_TRUE(is_rotary_buffer("model.layers.0.self_attn.rotary_emb.inv_freq"));
  EXPECT_FALSE(is_rotary_buffer("model.layers.0.self_attn.q_proj.weight"));
}

}  // namespace
}  // namespace fedshard::model
