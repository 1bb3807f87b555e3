#include "fedshard/nn/init.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::nn {
namespace {

using Words = std::array<std::uint32_t, 4>;

// Known answers of philox4x32-10 from the authors' distribution (Random123, kat_vectors).
TEST(Philox, GivesThePublishedAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Two units of primes: normal(0, 0.5), ones, normal(0, 2), of which the last has one element.
plan::ModelPlan small_plan() {
  plan::ModelPlan plan;
  const plan::Initializer half{plan::Initializer::Kind::normal, 0.5};
  const plan::Initializer one{plan::Initializer::Kind::constant, 1.0};
  const plan::Initializer two{plan::Initializer::Kind::normal, 2.0};
  plan.units = {{"a", {{"a.w", {7, 13}, half}, {"a.norm", {5}, one}}}, {"b", {{"b.v", {11}, two}, {"b.s", {1}, two}}}};
  plan.stages = {{"a", {0}}, {"b", {1}}};
  return plan;
}

std::vector<float> whole_unit(const plan::ModelPlan& plan, std::uint64_t seed, int unit) {
  std::vector<float> values(plan.units[unit].numel());
  initialize_slice(plan, seed, unit, 0, std::ssize(values), values);
  return values;
}

TEST(Init, EverySlicingGivesTheSameBits) {
  const plan::ModelPlan plan = small_plan();
  for (int unit = 0; unit < 2; ++unit) {
    const std::vector<float> whole = whole_unit(plan, 42, unit);
    const std::int64_t size = std::ssize(whole);
    for (const std::int64_t step : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{7}, size}) {
      std::vector<float> pieces(whole.size());
      for (std::int64_t begin = 0; begin < size; begin += step) {
        const std::int64_t end = std::min(begin + step, size);
        initialize_slice(plan, 42, unit, begin, end, std::span(pieces).subspan(begin, end - begin));
      }
      EXPECT_EQ(pieces, whole) << "unit " << unit << " in steps of " << step;
    }
  }
}

TEST(Init, AnElementDependsOnSeedAndGlobalIndexAlone) {
  const plan::ModelPlan plan = small_plan();
  const std::vector<float> a = whole_unit(plan, 42, 0);
  const std::vector<float> b = whole_unit(plan, 42, 1);
  for (int i = 0; i < 91; ++i) EXPECT_EQ(a[i], static_cast<float>(0.5 * static_cast<double>(normal_at(42, i)))) << i;
  for (int i = 91; i < 96; ++i) EXPECT_EQ(a[i], 1.0f);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(b[i], 2.0f * normal_at(42, 96 + i)) << i;
  EXPECT_NE(whole_unit(plan, 43, 0), a);
  EXPECT_NE(whole_unit(plan, 42 + (std::uint64_t{1} << 32), 0), a) << "the seed's upper half counts too";
}

TEST(Init, IndicesBeyond32BitsAreDifferentElements) {
  EXPECT_NE(normal_at(1, std::uint64_t{1} << 34), normal_at(1, 0));
  EXPECT_NE(normal_at(1, std::uint64_t{1} << 60), normal_at(1, 0));
}

TEST(Init, ValuesAreNormallyDistributed) {
  // 200,000 variates: the mean's standard error is 0.0022, the variance's 0.0032, a probability's at most 0.0011.
  constexpr int kCount = 200'000;
  double sum = 0;
  double squares = 0;
  double neighbours = 0;
  int within_one = 0;
  float previous = 0;
  for (int i = 0; i < kCount; ++i) {
    const float x = normal_at(7, i);
    ASSERT_TRUE(std::isfinite(x));
    sum += x;
    squares += static_cast<double>(x) * x;
    neighbours += static_cast<double>(x) * previous;
    within_one += std::fabs(x) < 1;
    previous = x;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 0.01);
  EXPECT_NEAR(squares / kCount, 1.0, 0.015);
  EXPECT_NEAR(neighbours / kCount, 0.0, 0.01);
  EXPECT_NEAR(static_cast<double>(within_one) / kCount, 0.6827, 0.005);
}

TEST(Init, ALlamaStartsAsTransformersDoes) {
  const model::Dims dims = model::preset("llama-tiny");
  const plan::ModelPlan plan = plan::llama_plan(dims);
  const std::vector<float> block = whole_unit(plan, 1, 1);
  for (int i = 0; i < dims.hidden_size; ++i) EXPECT_EQ(block[i], 1.0f);
  double squares = 0;
  const std::int64_t from = plan.units[1].offset_of(6);  // gate_proj, 24,576 elements
  const std::int64_t to = plan.units[1].offset_of(7);
  for (std::int64_t i = from; i < to; ++i) squares += static_cast<double>(block[i]) * block[i];
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(to - from)), 0.02, 0.0005);
}

TEST(Init, EmptySlicesAreFineAndOthersMustFit) {
  const plan::ModelPlan plan = small_plan();
  EXPECT_NO_THROW(initialize_slice(plan, 1, 1, 12, 12, {}));
  std::vector<float> out(2);
  EXPECT_THROW(initialize_slice(plan, 1, 1, 11, 13, out), base::RunError);
  EXPECT_THROW(initialize_slice(plan, 1, 1, 0, 1, out), base::RunError);
  EXPECT_THROW(initialize_slice(plan, 1, 2, 0, 2, out), base::RunError);
  EXPECT_THROW(initialize_slice(plan, 1, 0, -1, 1, out), base::RunError);
}

}  // namespace
}  // namespace fedshard::nn
