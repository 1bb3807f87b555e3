#include "fedshard/federation/outer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::federation {
namespace {

using plan::initial_moment;
using plan::Outer;
using plan::usual_options;
using Values = std::vector<float>;

const std::vector<Outer> kAll = {Outer::fedavg,  Outer::fedavgm, Outer::nesterov,
                                 Outer::fedadam, Outer::fedyogi, Outer::fedadagrad};

at::Tensor tensor_of(const Values& values) { return at::tensor(values, at::kFloat); }

Values values_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), tensor.const_data_ptr<float>() + tensor.numel()};
}

// EXPECT_EQ would call +0 and -0 equal and NaN unequal to itself.
bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Some of the size of weights, some far from it; both zeros; so that fp64 cannot hold every difference.
Values random_values(std::size_t numel, unsigned seed) {
  std::mt19937 random(seed);
  Values values;
  for (std::size_t i = 0; i < numel; ++i) {
    const float mantissa = std::uniform_real_distribution<float>(-1, 1)(random);
    const int exponent = i % 3 == 0 ? static_cast<int>(random() % 81) - 60 : -4;
    values.push_back(i % 11 == 0 ? std::copysign(0.0F, mantissa) : std::ldexp(mantissa, exponent));
  }
  return values;
}

// The parameters and moments of one slice, from the first round on.
struct Slice {
  Slice(const OuterOptions& of, const Values& anchor) : options(of), parameters(tensor_of(anchor)) {
    for (int k = 0; k < plan::outer_moments_of(of.outer); ++k) {
      moments.push_back(at::full({parameters.numel()}, initial_moment(of, k), at::kFloat));
    }
  }
  void step(const Values& mean, double factor = 1) {
    outer_step(options, parameters, tensor_of(mean), moments, factor);
  }
  Values now() const { return values_of(parameters); }

  OuterOptions options;
  at::Tensor parameters;
  std::vector<at::Tensor> moments;
};

OuterOptions momentum_options(Outer outer, double lr, double momentum) {
  OuterOptions options;
  options.outer = outer;
  options.lr = lr;
  options.momentum = momentum;
  return options;
}

struct Row {
  float gradient;  // that the round's mean is chosen to give
  double parameter;
  std::vector<double> moments;
};

void expect_table(const OuterOptions& options, const std::vector<Row>& rows) {
  Slice slice(options, {1});
  for (const Row& row : rows) {
    slice.step({slice.now()[0] - row.gradient});
    EXPECT_NEAR(slice.now()[0], row.parameter, 3e-7);
    for (std::size_t k = 0; k < row.moments.size(); ++k) {
      EXPECT_NEAR(values_of(slice.moments[k])[0], row.moments[k], 3e-7) << "moment " << k;
    }
  }
}

TEST(OuterTable, Fedavg) {
  OuterOptions options;
  options.lr = 0.5;
  expect_table(options, {{1, 0.5, {}}, {2, -0.5, {}}, {-0.5F, -0.25, {}}});
}

TEST(OuterTable, Fedavgm) {
  // m: 1; 0.5 + 2; 1.25 - 0.5.  x: 1 - 0.5; 0.5 - 1.25; -0.75 - 0.375.
  expect_table(momentum_options(Outer::fedavgm, 0.5, 0.5), {{1, 0.5, {1}}, {2, -0.75, {2.5}}, {-0.5F, -1.125, {0.75}}});
}

TEST(OuterTable, Nesterov) {
  // m as above.  Direction: 1 + 0.5; 2 + 1.25; -0.5 + 0.375.  x: 1 - 0.75; 0.25 - 1.625; -1.375 + 0.0625.
  expect_table(momentum_options(Outer::nesterov, 0.5, 0.5),
               {{1, 0.25, {1}}, {2, -1.375, {2.5}}, {-0.5F, -1.3125, {0.75}}});
}

OuterOptions adaptive_options(Outer outer) {
  OuterOptions options;
  options.outer = outer;
  options.lr = 0.5;
  options.beta1 = 0.5;
  options.beta2 = 0.75;
  options.tau = 0.5;
  return options;
}

// m of all three: 0.5; 0.25 + 1; 0.625 - 0.25.  x: less 0.5 m / (root of v + 0.5) each time.
TEST(OuterTable, Fedadam) {
  // v: 0.1875 + 0.25; 0.328125 + 1; 0.99609375 + 0.0625.  Roots: 0.66143783, 1.15244306, 1.02887985.
  expect_table(
      adaptive_options(Outer::fedadam),
      {{1, 0.78474956, {0.5, 0.4375}}, {2, 0.40652170, {1.25, 1.328125}}, {-0.5F, 0.28388290, {0.375, 1.05859375}}});
}

TEST(OuterTable, Fedyogi) {
  // v: 0.25 + 0.25; 0.5 + 1; 1.5 - 0.0625 (it alone shrinks).  Roots: 0.70710678, 1.22474487, 1.19895788.
  expect_table(adaptive_options(Outer::fedyogi),
               {{1, 0.79289322, {0.5, 0.5}}, {2, 0.43052078, {1.25, 1.5}}, {-0.5F, 0.32015901, {0.375, 1.4375}}});
}

TEST(OuterTable, Fedadagrad) {
  // v: 0.25 + 1; 1.25 + 4; 5.25 + 0.25.  Roots: 1.11803399, 2.29128785, 2.34520788.
  expect_table(adaptive_options(Outer::fedadagrad),
               {{1, 0.84549150, {0.5, 1.25}}, {2, 0.62158052, {1.25, 5.25}}, {-0.5F, 0.55568024, {0.375, 5.5}}});
}

// One element in fp64, as the papers write it: Delta = mean - x is added.
class Reference {
 public:
  Reference(const OuterOptions& options, double anchor) : o_(options), x_(anchor), v_(options.tau * options.tau) {}

  double step(double mean, double factor) {
    const double delta = factor * (mean - x_);
    rounds_ += 1;
    switch (o_.outer) {
      case Outer::fedavg:
        return x_ += o_.lr * delta;
      case Outer::fedavgm:
      case Outer::nesterov:
        return sgd(-delta);
      case Outer::fedadam:
        v_ = o_.beta2 * v_ + (1 - o_.beta2) * delta * delta;
        break;
      case Outer::fedyogi:
        if (v_ > delta * delta)
          v_ -= (1 - o_.beta2) * delta * delta;
        else if (v_ < delta * delta)
          v_ += (1 - o_.beta2) * delta * delta;
        break;
      case Outer::fedadagrad:
        v_ += delta * delta;
        break;
    }
    m_ = o_.beta1 * m_ + (1 - o_.beta1) * delta;
    return x_ += o_.lr * m_ / (std::sqrt(v_) + o_.tau);
  }

 private:
  // torch.optim.SGD: the buffer is the first gradient, afterwards momentum * buffer + (1 - dampening) * gradient.
  double sgd(double gradient) {
    m_ = rounds_ == 1 ? gradient : o_.momentum * m_ + gradient;
    return x_ -= o_.lr * (o_.outer == Outer::nesterov ? gradient + o_.momentum * m_ : m_);
  }

  OuterOptions o_;
  double x_, m_ = 0, v_;
  int rounds_ = 0;
};

TEST(Outer, EqualsTheFormulasInFp64) {
  for (const Outer outer : kAll) {
    const OuterOptions options = usual_options(outer);
    std::mt19937 random(7);
    std::normal_distribution<float> weight(0, 0.02F), change(0, 0.002F);
    Values anchor(257);
    for (float& a : anchor) a = weight(random);
    Slice slice(options, anchor);
    std::vector<Reference> references;
    for (const float a : anchor) references.emplace_back(options, a);
    for (int round = 0; round < 12; ++round) {
      const double factor = round % 3 == 2 ? 0.37 : 1;
      Values mean = slice.now();
      for (float& value : mean) value += change(random);
      slice.step(mean, factor);
      for (std::size_t i = 0; i < anchor.size(); ++i) {
        ASSERT_NEAR(slice.now()[i], references[i].step(mean[i], factor), 1e-7)
            << "optimizer " << static_cast<int>(outer) << ", round " << round;
      }
    }
  }
}

TEST(Outer, AWholeStepIsTheMeanToTheBit) {
  const Values anchor = random_values(500, 1);
  for (const OuterOptions& options : {usual_options(Outer::fedavg), momentum_options(Outer::fedavgm, 1, 0),
                                      momentum_options(Outer::nesterov, 1, 0)}) {
    Slice slice(options, anchor);
    for (unsigned round = 0; round < 3; ++round) {
      const Values mean = random_values(500, 2 + round);
      slice.step(mean);
      EXPECT_TRUE(same_bits(slice.now(), mean)) << "optimizer " << static_cast<int>(options.outer);
    }
  }
}

TEST(Outer, AZeroPseudoGradientChangesNothing) {
  for (const Outer outer : kAll) {
    const Values anchor = random_values(100, 4);
    Slice slice(usual_options(outer), anchor);
    for (int round = 0; round < 10; ++round) slice.step(anchor);
    EXPECT_TRUE(same_bits(slice.now(), anchor)) << "optimizer " << static_cast<int>(outer);
    for (const at::Tensor& moment : slice.moments) EXPECT_TRUE(at::isfinite(moment).all().item<bool>());
  }
}

TEST(Outer, WithLr0TheParametersStayAndTheMomentsGoOn) {
  for (const Outer outer : kAll) {
    OuterOptions options = usual_options(outer);
    options.lr = 0;
    const Values anchor = random_values(100, 5);
    Slice slice(options, anchor);
    for (unsigned round = 0; round < 3; ++round) slice.step(random_values(100, 6 + round));
    EXPECT_TRUE(same_bits(slice.now(), anchor)) << "optimizer " << static_cast<int>(outer);
    if (!slice.moments.empty()) {
      EXPECT_GT(slice.moments[0].abs().sum().item<float>(), 0);
    }
  }
}

TEST(Outer, TinyPseudoGradientsStayFinite) {
  for (const Outer outer : kAll) {
    for (const float tiny : {1e-45F, 1e-38F, 1e-20F, 1e-7F}) {
      Slice slice(usual_options(outer), {0, 0.5F, -tiny, tiny});
      for (int round = 0; round < 10; ++round) {
        Values mean = slice.now();
        for (float& value : mean) value -= tiny;
        slice.step(mean);
        for (const float value : slice.now()) ASSERT_TRUE(std::isfinite(value) && std::abs(value) < 0.6F);
      }
    }
  }
}

TEST(Outer, AnyCutGivesTheSameBits) {
  constexpr std::size_t kNumel = 211;  // prime, so that no vector width divides it
  std::mt19937 random(9);
  for (const Outer outer : kAll) {
    const Values anchor = random_values(kNumel, 20);
    for (int cut = 0; cut < 20; ++cut) {
      Slice whole(usual_options(outer), anchor);
      std::vector<std::size_t> bounds = {0};
      while (bounds.back() < kNumel) {
        bounds.push_back(std::min<std::size_t>(kNumel, bounds.back() + random() % (cut % 2 == 0 ? 7 : 90)));
      }
      std::vector<Slice> slices;
      for (std::size_t s = 0; s + 1 < bounds.size(); ++s) {
        slices.emplace_back(whole.options, Values(anchor.begin() + static_cast<std::ptrdiff_t>(bounds[s]),
                                                  anchor.begin() + static_cast<std::ptrdiff_t>(bounds[s + 1])));
      }
      Values joined;
      for (unsigned round = 0; round < 3; ++round) {
        const Values mean = random_values(kNumel, 30 + round);
        whole.step(mean, 0.9);
        joined.clear();
        for (std::size_t s = 0; s < slices.size(); ++s) {
          slices[s].step(Values(mean.begin() + static_cast<std::ptrdiff_t>(bounds[s]),
                                mean.begin() + static_cast<std::ptrdiff_t>(bounds[s + 1])),
                         0.9);
          const Values part = slices[s].now();
          joined.insert(joined.end(), part.begin(), part.end());
        }
      }
      ASSERT_TRUE(same_bits(whole.now(), joined)) << "optimizer " << static_cast<int>(outer);
    }
  }
}

TEST(Outer, WhatIsNotFiniteIsNotHidden) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinite = std::numeric_limits<float>::infinity();
  for (const Outer outer : kAll) {
    for (const double lr : {0.0, 0.5, 1.0}) {
      OuterOptions options = usual_options(outer);
      options.lr = lr;
      const auto good = [](const Slice& slice, std::size_t i) { return std::isfinite(slice.now()[i]); };
      for (const float bad : {nan, infinite, -infinite}) {
        Slice from_mean(options, {1, 2, 3});
        from_mean.step({1, bad, 2});
        EXPECT_TRUE(good(from_mean, 0) && !good(from_mean, 1) && good(from_mean, 2));
        Slice from_anchor(options, {1, bad, 3});
        from_anchor.step({1, 1, 2});
        const bool looks_at_it = outer != Outer::fedavg || lr != 1;
        EXPECT_TRUE(good(from_anchor, 0) && good(from_anchor, 1) == !looks_at_it && good(from_anchor, 2));
        if (from_mean.moments.empty()) continue;
        Slice from_moment(options, {1, 2, 3});
        from_moment.moments[0][1] = bad;
        from_moment.step({1, 1, 2});
        EXPECT_TRUE(good(from_moment, 0) && !good(from_moment, 1) && good(from_moment, 2));
      }
    }
    Slice from_factor(usual_options(outer), {1, 2});
    from_factor.step({0, 1}, clip_factor({.max_norm = 1}, nan));
    EXPECT_TRUE(std::isnan(from_factor.now()[0]) && std::isnan(from_factor.now()[1]));
  }
}

TEST(Outer, ClippingTakesTheNormDown) {
  OuterOptions options;
  EXPECT_EQ(clip_factor(options, 1e9), 1);
  options.max_norm = 2;
  EXPECT_EQ(clip_factor(options, 0), 1);
  EXPECT_EQ(clip_factor(options, 2), 1);
  EXPECT_EQ(clip_factor(options, 8), 0.25);
  Slice slice(options, {6, 10});
  slice.step({2, 10}, 0.5);  // pseudo-gradient 4 becomes 2
  EXPECT_EQ(slice.now(), (Values{4, 10}));
}

TEST(Outer, AnEmptySliceIsNoTrouble) {
  for (const Outer outer : kAll) {
    Slice slice(usual_options(outer), {});
    slice.step({});
    EXPECT_EQ(slice.now(), Values{});
  }
}

TEST(Outer, RefusesValuesOutOfTheirRange) {
  for (const Outer outer : kAll) EXPECT_NO_THROW(check_options(usual_options(outer)));
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::string, double OuterOptions::*>> keys = {
      {"lr", &OuterOptions::lr},       {"max_norm", &OuterOptions::max_norm}, {"momentum", &OuterOptions::momentum},
      {"beta1", &OuterOptions::beta1}, {"beta2", &OuterOptions::beta2},       {"tau", &OuterOptions::tau}};
  for (const auto& [name, key] : keys) {
    std::vector<double> bad = {-0.1, nan, infinite};
    if (name == "momentum" || name.starts_with("beta")) bad.push_back(1);
    if (name == "tau") bad.push_back(0);
    for (const double value : bad) {
      OuterOptions options = usual_options(Outer::fedadam);
      options.*key = value;
      try {
        plan::check_options(options);
        ADD_FAILURE() << name << " = " << value << " was accepted";
      } catch (const base::UsageError& error) {
        EXPECT_NE(std::string(error.what()).find(name + " is "), std::string::npos) << error.what();
      }
    }
  }
}

TEST(Outer, RefusesTensorsThatDoNotFit) {
  const OuterOptions options = usual_options(Outer::fedavgm);
  const auto step = [&](at::Tensor parameters, const at::Tensor& mean, std::vector<at::Tensor> moments) {
    outer_step(options, parameters, mean, moments, 1);
  };
  const at::Tensor good = at::zeros({4});
  EXPECT_NO_THROW(step(good.clone(), good, {good.clone()}));
  EXPECT_THROW(step(good.clone(), good, {}), base::RunError);
  EXPECT_THROW(step(good.clone(), good, {good.clone(), good.clone()}), base::RunError);
  EXPECT_THROW(step(good.clone(), at::zeros({3}), {good.clone()}), base::RunError);
  EXPECT_THROW(step(good.clone(), good, {at::zeros({5})}), base::RunError);
  EXPECT_THROW(step(good.clone(), at::zeros({4}, at::kDouble), {good.clone()}), base::RunError);
  EXPECT_THROW(step(good.clone(), at::zeros({8}).slice(0, 0, 8, 2), {good.clone()}), base::RunError);
}

TEST(Outer, MomentsAndWhatTheyStartAt) {
  const std::vector<int> moments = {0, 1, 1, 2, 2, 2};
  for (std::size_t k = 0; k < kAll.size(); ++k) {
    const OuterOptions options = usual_options(kAll[k]);
    EXPECT_EQ(plan::outer_moments_of(kAll[k]), moments[k]);
    EXPECT_THROW(initial_moment(options, moments[k]), base::RunError);
    if (moments[k] > 0) {
      EXPECT_EQ(initial_moment(options, 0), 0);
    }
    if (moments[k] == 2) {
      EXPECT_EQ(initial_moment(options, 1), 1e-6F);
    }
  }
}

}  // namespace
}  // namespace fedshard::federation
