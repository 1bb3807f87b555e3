#include "fedshard/optim/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "tests/support/rank_threads.h"

namespace fedshard::optim {
namespace {

using Name = OptimizerOptions::Name;

constexpr int kSteps = 50;

// Units with matrices and vectors in turn, of prime and tiny sizes: with 5 shards some cut parameters and some are
// empty. Only optimizers run on it, so that its stages compute nothing.
nn::Model units_of_parameters() {
  nn::Model model;
  plan::ModelPlan& plan = model.plan;
  plan.units = {{"mixed", {{"a", {3, 7}, {}}, {"b", {5}, {}}, {"c", {1}, {}}, {"d", {2, 2}, {}}, {"e", {2, 1, 2}, {}}}},
                {"one", {{"f", {1}, {}}}},
                {"two", {{"g", {1, 2}, {}}}},
                {"large", {{"h", {29, 31}, {}}, {"i", {97}, {}}, {"j", {13, 3}, {}}}},
                {"vectors", {{"k", {11}, {}}, {"l", {8}, {}}}}};
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    plan.stages.push_back({plan.units[u].name, u});
    model.stages.push_back([](nn::Parameters, const at::Tensor& x, const nn::MicroBatch&) { return x; });
  }
  return model;
}

float start_value(std::int64_t index) { return 0.7f * std::sin(1.3f * static_cast<float>(index) + 0.2f); }

// Gradients of many magnitudes, of both signs, and sometimes zero.
float gradient_value(std::int64_t index, std::int64_t step) {
  if ((index + step) % 17 == 0) return 0;
  const double phase = 0.37 * static_cast<double>(index) + 1.9 * static_cast<double>(step);
  return static_cast<float>(std::sin(phase) * std::pow(10.0, static_cast<double>(index % 7) - 5));
}

double rate(std::int64_t step) { return 0.01 * (1 + 0.5 * std::sin(static_cast<double>(step))); }

void write(const plan::ModelPlan& plan, const shard::Arena& arena, const std::function<float(std::int64_t)>& value) {
  for (int u = 0; u < arena.map().units(); ++u) {
    const topology::Range held = arena.map().range(u);
    float* out = arena.real(u).mutable_data_ptr<float>();
    for (std::int64_t i = 0; i < held.size(); ++i) out[i] = value(plan.global_offset(u) + held.begin + i);
  }
}

void expect_padding_is_zero(const shard::Arena& arena) {
  for (int u = 0; u < arena.map().units(); ++u) {
    const std::int64_t real = arena.map().range(u).size();
    EXPECT_EQ(arena.unit(u).slice(0, real).abs().sum().item<double>(), 0) << "unit " << u;
  }
}

// The parameters after kSteps on `shards` ranks, by global index.
std::vector<float> sharded_result(const OptimizerOptions& options, int shards) {
  const nn::Model model = units_of_parameters();
  const plan::ModelPlan& plan = model.plan;
  std::vector<float> result(static_cast<std::size_t>(plan.numel()), std::nanf(""));
  testing_support::on_ranks(topology::Layout::make(shards, {}), [&](int rank, comm::Axes& axes) {
    shard::StateRegistry registry;
    shard::Engine engine(model, shards, rank, axes, {}, registry);
    write(plan, engine.parameters(), start_value);
    const auto optimizer = make_optimizer(options, engine, registry);
    for (std::int64_t step = 1; step <= kSteps; ++step) {
      write(plan, engine.gradients(), [&](std::int64_t index) { return gradient_value(index, step); });
      for (int u = 0; u < engine.map().units(); ++u) optimizer->step(u, step, rate(step));
    }
    for (const shard::State& state : registry.all()) expect_padding_is_zero(*state.arena);
    for (int u = 0; u < engine.map().units(); ++u) {
      const topology::Range held = engine.map().range(u);
      const float* values = engine.parameters().real(u).const_data_ptr<float>();
      std::copy(values, values + held.size(), result.begin() + plan.global_offset(u) + held.begin);
    }
  });
  return result;
}

// One element in fp64. Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with the decay scaled by the rate.
double adamw_element(const OptimizerOptions& o, std::int64_t index, double decay) {
  double p = start_value(index), m = 0, v = 0;
  for (std::int64_t t = 1; t <= kSteps; ++t) {
    const double g = gradient_value(index, t), lr = rate(t);
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, t)), v_hat = v / (1 - std::pow(o.beta2, t));
    p -= lr * decay * p + lr * m_hat / (std::sqrt(v_hat) + o.eps);
  }
  return p;
}

// One element in fp64: the momentum of Polyak as torch.optim.SGD writes it, with the decay in the gradient.
double sgd_element(const OptimizerOptions& o, std::int64_t index, double decay) {
  double p = start_value(index), velocity = 0;
  for (std::int64_t t = 1; t <= kSteps; ++t) {
    velocity = o.momentum * velocity + gradient_value(index, t) + decay * p;
    p -= rate(t) * velocity;
  }
  return p;
}

void expect_equals_formula(const OptimizerOptions& options, const std::vector<float>& got) {
  const plan::ModelPlan plan = units_of_parameters().plan;
  std::int64_t index = 0;
  for (const plan::UnitSpec& unit : plan.units) {
    for (const plan::ParameterSpec& parameter : unit.parameters) {
      const double decay = parameter.shape.size() >= 2 ? options.weight_decay : 0.0;
      for (std::int64_t i = 0; i < parameter.numel(); ++i, ++index) {
        const double expected =
            options.name == Name::sgd ? sgd_element(options, index, decay) : adamw_element(options, index, decay);
        ASSERT_NEAR(got[static_cast<std::size_t>(index)], expected, 3e-6)
            << "element " << i << " of " << parameter.name;
      }
    }
  }
}

std::vector<OptimizerOptions> all_options() {
  return {{.name = Name::adamw},
          {.name = Name::adamw, .beta1 = 0.8, .beta2 = 0.999, .eps = 1e-3, .weight_decay = 0.5},
          {.name = Name::adamw, .weight_decay = 0},
          {.name = Name::sgd, .weight_decay = 0},
          {.name = Name::sgd, .weight_decay = 0.3},
          {.name = Name::sgd, .momentum = 0.9, .weight_decay = 0},
          {.name = Name::sgd, .momentum = 0.9, .weight_decay = 0.3}};
}

TEST(Optimizer, FollowsTheFormulaOverFiftySteps) {
  for (const OptimizerOptions& options : all_options()) {
    SCOPED_TRACE(testing::Message() << (options.name == Name::sgd ? "sgd, momentum " : "adamw, beta1 ")
                                    << (options.name == Name::sgd ? options.momentum : options.beta1) << ", decay "
                                    << options.weight_decay);
    expect_equals_formula(options, sharded_result(options, 1));
  }
}

// Not to the bit: LibTorch's kernels round the elements of a whole vector register and those of a tail differently, and
// which is which depends on where the shard is cut. But the same shard gives the same bits, as replicas rely on.
TEST(Optimizer, ShardsGiveWhatTheWholeGives) {
  for (const OptimizerOptions& options : all_options()) {
    const std::vector<float> whole = sharded_result(options, 1);
    for (const int shards : {2, 3, 5}) {
      const std::vector<float> got = sharded_result(options, shards);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        ASSERT_NEAR(got[i], whole[i], 1e-6)
            << (options.name == Name::sgd ? "sgd" : "adamw") << ", " << shards << " shards, element " << i;
      }
      EXPECT_EQ(got, sharded_result(options, shards));
    }
  }
}

TEST(Optimizer, StepsOneUnitAtATime) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    for (const OptimizerOptions& options : all_options()) {
      shard::StateRegistry registry;
      shard::Engine engine(model, 1, 0, axes, {}, registry);
      write(model.plan, engine.parameters(), start_value);
      write(model.plan, engine.gradients(), [](std::int64_t) { return 1.0f; });
      const auto optimizer = make_optimizer(options, engine, registry);
      const at::Tensor before = engine.parameters().flat().clone();
      optimizer->step(3, 1, 0.1);
      for (int u = 0; u < engine.map().units(); ++u) {
        const at::Tensor old = before.narrow(0, engine.map().offset(u), engine.map().shard_numel(u));
        EXPECT_EQ(at::equal(engine.parameters().unit(u), old), u != 3) << "unit " << u;
      }
    }
  });
}

// The gradient of all elements is zero: what moves is the weight decay alone, on matrices alone.
TEST(Optimizer, DecaysMatricesAndNothingElse) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    for (const Name name : {Name::adamw, Name::sgd}) {
      shard::StateRegistry registry;
      shard::Engine engine(model, 1, 0, axes, {}, registry);
      write(model.plan, engine.parameters(), [](std::int64_t) { return 1.0f; });
      const auto optimizer = make_optimizer({.name = name, .weight_decay = 0.5}, engine, registry);
      for (int u = 0; u < engine.map().units(); ++u) {
        optimizer->step(u, 1, 0.25);
        std::int64_t begin = 0;
        for (const plan::ParameterSpec& parameter : model.plan.units[u].parameters) {
          const at::Tensor values = engine.parameters().real(u).narrow(0, begin, parameter.numel());
          EXPECT_TRUE(at::equal(values, at::full_like(values, parameter.is_matrix() ? 0.875f : 1.0f)))
              << parameter.name;
          begin += parameter.numel();
        }
      }
    }
  });
}

TEST(Optimizer, RegistersItsMoments) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    const auto moments_of = [&](const OptimizerOptions& options) {
      shard::StateRegistry registry;
      shard::Engine engine(model, 1, 0, axes, {}, registry);
      const auto optimizer = make_optimizer(options, engine, registry);
      std::vector<std::string> names;
      for (const shard::State& state : registry.all()) {
        if (state.role != shard::Role::moments) continue;
        names.push_back(state.name);
        EXPECT_EQ(state.scope, shard::Scope::group);
        EXPECT_EQ(state.arena->flat().numel(), engine.map().numel());
      }
      return names;
    };
    EXPECT_EQ(moments_of({.name = Name::adamw}), (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
    EXPECT_EQ(moments_of({.name = Name::sgd, .momentum = 0.9}), std::vector<std::string>{"momentum_buffer"});
    EXPECT_EQ(moments_of({.name = Name::sgd}), std::vector<std::string>{});
  });
}

}  // namespace
}  // namespace fedshard::optim
