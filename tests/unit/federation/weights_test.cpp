#include "fedshard/federation/weights.h"

#include <gtest/gtest.h>

#include <numeric>

#include "fedshard/base/error.h"

namespace fedshard::federation {
namespace {

using Tokens = std::vector<std::int64_t>;
using Weights = std::vector<double>;

TEST(Weights, ByTokens) {
  EXPECT_EQ(weights_of(WeightPolicy::tokens, Tokens{3, 1}), (Weights{0.75, 0.25}));
  EXPECT_EQ(weights_of(WeightPolicy::tokens, Tokens{5}), Weights{1});
  EXPECT_EQ(weights_of(WeightPolicy::tokens, Tokens{7, 7, 7, 7}), (Weights{0.25, 0.25, 0.25, 0.25}));
}

TEST(Weights, AGroupWithoutTokensWeighsNothing) {
  EXPECT_EQ(weights_of(WeightPolicy::tokens, Tokens{0, 6, 2}), (Weights{0, 0.75, 0.25}));
  EXPECT_EQ(weights_of(WeightPolicy::tokens, Tokens{0, 9}), (Weights{0, 1}));
}

TEST(Weights, WithoutAnyTokensAllWeighTheSame) {
  EXPECT_EQ(weights_of(WeightPolicy::tokens, Tokens{0}), (Weights{1}));
  EXPECT_EQ(weights_of(WeightPolicy::tokens, Tokens{0, 0, 0, 0}), (Weights{0.25, 0.25, 0.25, 0.25}));
}

TEST(Weights, UniformLooksAtNoTokens) {
  EXPECT_EQ(weights_of(WeightPolicy::uniform, Tokens{100, 0, 1, 7}), (Weights{0.25, 0.25, 0.25, 0.25}));
  EXPECT_EQ(weights_of(WeightPolicy::uniform, Tokens{0, 0}), (Weights{0.5, 0.5}));
}

TEST(Weights, SumToOne) {
  for (const Tokens& tokens : {Tokens{1, 2, 3, 5, 7, 11, 13}, Tokens{1, 1'000'000'000'000}, Tokens{1, 1, 1}}) {
    for (const WeightPolicy policy : {WeightPolicy::tokens, WeightPolicy::uniform}) {
      const Weights weights = weights_of(policy, tokens);
      EXPECT_NEAR(std::accumulate(weights.begin(), weights.end(), 0.0), 1.0, 1e-15);
    }
  }
}

}  // namespace
}  // namespace fedshard::federation
