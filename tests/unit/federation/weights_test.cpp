#include "fedshard/federation/weights.h"

#include <gtest/gtest.h>

#include <numeric>

#include "fedshard/base/error.h"

namespace fedshard::federation {
namespace {

using Tokens = std::vector<std::int64_t>;
using Weights = std::vector<double>;

const WeightPolicy kByTokens{WeighBy::tokens}, kAlike{WeighBy::group};

TEST(Weights, ByTokens) {
  EXPECT_EQ(weights_of(kByTokens, Tokens{3, 1}), (Weights{0.75, 0.25}));
  EXPECT_EQ(weights_of(kByTokens, Tokens{5}), Weights{1});
  EXPECT_EQ(weights_of(kByTokens, Tokens{7, 7, 7, 7}), (Weights{0.25, 0.25, 0.25, 0.25}));
}

TEST(Weights, AGroupWithoutTokensWeighsNothing) {
  EXPECT_EQ(weights_of(kByTokens, Tokens{0, 6, 2}), (Weights{0, 0.75, 0.25}));
  EXPECT_EQ(weights_of(kByTokens, Tokens{0, 9}), (Weights{0, 1}));
}

TEST(Weights, WithoutAnyTokensAllWeighTheSame) {
  EXPECT_EQ(weights_of(kByTokens, Tokens{0}), (Weights{1}));
  EXPECT_EQ(weights_of(kByTokens, Tokens{0, 0, 0, 0}), (Weights{0.25, 0.25, 0.25, 0.25}));
}

TEST(Weights, UniformLooksAtNoTokens) {
  EXPECT_EQ(weights_of(kAlike, Tokens{100, 0, 1, 7}), (Weights{0.25, 0.25, 0.25, 0.25}));
  EXPECT_EQ(weights_of(kAlike, Tokens{0, 0}), (Weights{0.5, 0.5}));
}

TEST(Weights, OfAListAreSharesOfItsSum) {
  const WeightPolicy list{WeighBy::fixed, {3, 0, 1}};
  EXPECT_EQ(weights_of(list, Tokens{0, 5, 9}), (Weights{0.75, 0, 0.25}));
  EXPECT_EQ(weights_of({WeighBy::fixed, {1e-300}}, Tokens{0}), Weights{1});
  EXPECT_EQ(weights_of({WeighBy::fixed, {1e308, 1e308}}, Tokens{0, 0}), (Weights{0.5, 0.5}));
  EXPECT_THROW(weights_of(list, Tokens{1, 1}), base::RunError);
}

TEST(Weights, ThoseLeftOutCountForNothing) {
  EXPECT_EQ(weights_of(kByTokens, Tokens{3, 100, 1}, {false, true, false}), (Weights{0.75, 0, 0.25}));
  EXPECT_EQ(weights_of(kAlike, Tokens{3, 100, 1}, {true, false, false}), (Weights{0, 0.5, 0.5}));
  // The only one that has trained is left out: the others have not moved, and weigh the same.
  EXPECT_EQ(weights_of(kByTokens, Tokens{0, 7, 0}, {false, true, false}), (Weights{0.5, 0, 0.5}));
  EXPECT_EQ(weights_of({WeighBy::fixed, {0, 1}}, Tokens{1, 1}, {false, true}), (Weights{1, 0}));
  EXPECT_THROW(weights_of(kByTokens, Tokens{1, 2}, {true, true}), base::RunError);
}

TEST(Weights, SumToOne) {
  for (const Tokens& tokens : {Tokens{1, 2, 3, 5, 7, 11, 13}, Tokens{1, 1'000'000'000'000}, Tokens{1, 1, 1}}) {
    for (const WeightPolicy& policy : {kByTokens, kAlike}) {
      const Weights weights = weights_of(policy, tokens);
      EXPECT_NEAR(std::accumulate(weights.begin(), weights.end(), 0.0), 1.0, 1e-15);
    }
  }
}

}  // namespace
}  // namespace fedshard::federation
