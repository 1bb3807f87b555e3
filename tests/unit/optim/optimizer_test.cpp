#include "fedshard/optim/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "fedshard/base/error.h"
#include "tests/unit/optim/optimizer_problem.h"

namespace fedshard::optim {
namespace {

using plan::Update;

bool is_muon(const NamedOptions& named) { return named.options.updates.update == Update::muon; }

void expect_padding_is_zero(const shard::Arena& arena) {
  if (!arena.map().is_whole()) return;  // has none
  for (int u = 0; u < arena.map().units(); ++u) {
    const std::int64_t real = arena.map().range(u).size();
    EXPECT_EQ(arena.unit(u).slice(0, real).abs().sum().item<double>(), 0) << "unit " << u;
  }
}

// The rule of each parameter, said again: the groups of all_options() apply, if there are any.
plan::UpdateRule rule_of(const OptimizerOptions& options, const plan::ParameterSpec& parameter) {
  plan::UpdateRule rule{options.updates.update, 1, parameter.shape.size() >= 2 ? options.updates.weight_decay : 0.0};
  if (options.updates.groups.empty()) return rule;
  const bool first = parameter.name == "h" || parameter.name == "e" || parameter.name == "f";
  if (first) return {rule.update, 0.5, rule.weight_decay};
  return {rule.update, 2, 0.25};
}

// One element in fp64. Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with the decay scaled by the rate.
double adamw_element(const OptimizerOptions& o, std::int64_t index, const plan::UpdateRule& rule) {
  double p = start_value(index), m = 0, v = 0;
  for (std::int64_t t = 1; t <= kSteps; ++t) {
    const double g = gradient_value(index, t), lr = rate(t) * rule.lr_factor;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, t)), v_hat = v / (1 - std::pow(o.beta2, t));
    p -= lr * rule.weight_decay * p + lr * m_hat / (std::sqrt(v_hat) + o.eps);
  }
  return p;
}

// One element in fp64: the momentum of Polyak or Nesterov as torch.optim.SGD writes it, with the decay in the gradient.
double sgd_element(const OptimizerOptions& o, std::int64_t index, const plan::UpdateRule& rule) {
  double p = start_value(index), velocity = 0;
  for (std::int64_t t = 1; t <= kSteps; ++t) {
    const double g = gradient_value(index, t) + rule.weight_decay * p;
    velocity = o.momentum * velocity + g;
    p -= rate(t) * rule.lr_factor * (o.nesterov ? g + o.momentum * velocity : velocity);
  }
  return p;
}

void expect_equals_formula(const OptimizerOptions& options, const std::vector<float>& got) {
  const plan::ModelPlan plan = units_of_parameters().plan;
  std::int64_t index = 0;
  for (const plan::UnitSpec& unit : plan.units) {
    for (const plan::ParameterSpec& parameter : unit.parameters) {
      const plan::UpdateRule rule = rule_of(options, parameter);
      for (std::int64_t i = 0; i < parameter.numel(); ++i, ++index) {
        const double expected = options.updates.update == Update::adamw ? adamw_element(options, index, rule)
                                                                        : sgd_element(options, index, rule);
        ASSERT_NEAR(got[static_cast<std::size_t>(index)], expected, 4e-6)
            << "element " << i << " of " << parameter.name;
      }
    }
  }
}

TEST(Optimizer, FollowsTheFormulaOverFiftySteps) {
  for (const NamedOptions& named : all_options()) {
    if (is_muon(named)) continue;  // its oracle is torch.optim.Muon, in tests/parity
    SCOPED_TRACE(named.name);
    expect_equals_formula(named.options, sharded_result(named.options, 1));
  }
}

// Not to the bit: LibTorch's kernels round the elements of a whole vector register and those of a tail differently, and
// which is which depends on where the shard is cut. But the same shard gives the same bits, as replicas rely on.
TEST(Optimizer, ShardsGiveWhatTheWholeGives) {
  const auto inspect = [](const shard::Engine&, const shard::StateRegistry& registry) {
    for (const shard::State& state : registry.all()) expect_padding_is_zero(*state.arena);
  };
  for (const NamedOptions& named : all_options()) {
    const std::vector<float> whole = sharded_result(named.options, 1);
    for (const int shards : {2, 3, 5}) {
      const std::vector<float> got = sharded_result(named.options, shards, inspect);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        ASSERT_NEAR(got[i], whole[i], 1e-6) << named.name << ", " << shards << " shards, element " << i;
      }
      EXPECT_EQ(got, sharded_result(named.options, shards));
    }
  }
}

TEST(Optimizer, StepsOneUnitAtATime) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    for (const NamedOptions& named : all_options()) {
      shard::StateRegistry registry;
      shard::Engine engine(model, 1, 0, axes, {}, registry);
      write(model.plan, engine.parameters(), start_value);
      write(model.plan, engine.gradients(), [](std::int64_t) { return 1.0f; });
      const auto optimizer = make_optimizer(named.options, engine, axes, registry);
      const at::Tensor before = engine.parameters().flat().clone();
      optimizer->step(3, 1, 0.1);
      for (int u = 0; u < engine.map().units(); ++u) {
        const at::Tensor old = before.narrow(0, engine.map().offset(u), engine.map().shard_numel(u));
        EXPECT_EQ(at::equal(engine.parameters().unit(u), old), u != 3) << named.name << ", unit " << u;
      }
    }
  });
}

// The gradient of all elements is zero: what moves is the weight decay alone, on matrices alone.
TEST(Optimizer, DecaysMatricesAndNothingElse) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    for (const Update update : {Update::adamw, Update::sgd, Update::muon}) {
      shard::StateRegistry registry;
      shard::Engine engine(model, 1, 0, axes, {}, registry);
      write(model.plan, engine.parameters(), [](std::int64_t) { return 1.0f; });
      const auto optimizer = make_optimizer({.updates = {update, 0.5, {}}}, engine, axes, registry);
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

TEST(Optimizer, ResetIsAFreshStart) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(2, {}), [&](int rank, comm::Axes& axes) {
    for (const NamedOptions& named : all_options()) {
      shard::StateRegistry registry, fresh_registry;
      shard::Engine engine(model, 2, rank, axes, {}, registry), fresh(model, 2, rank, axes, {}, fresh_registry);
      const auto optimizer = make_optimizer(named.options, engine, axes, registry);
      const auto other = make_optimizer(named.options, fresh, axes, fresh_registry);
      write(model.plan, engine.parameters(), start_value);
      run_steps(*optimizer, engine, 1, 7);
      optimizer->reset();
      write(model.plan, engine.parameters(), start_value);
      write(model.plan, fresh.parameters(), start_value);
      run_steps(*optimizer, engine, 1, 5);
      run_steps(*other, fresh, 1, 5);
      EXPECT_TRUE(at::equal(engine.parameters().flat(), fresh.parameters().flat())) << named.name;
    }
  });
}

// What a checkpoint does: the registered moments and the parameters are all that outlives the optimizer.
TEST(Optimizer, GoesOnFromItsRegisteredMomentsToTheBit) {
  const nn::Model model = units_of_parameters();
  for (const NamedOptions& named : all_options()) {
    for (const int shards : {1, 3}) {
      testing_support::on_ranks(topology::Layout::make(shards, {}), [&](int rank, comm::Axes& axes) {
        const auto with_optimizer =
            [&](const std::function<void(shard::Engine&, Optimizer&, std::vector<at::Tensor>&)>& body) {
              shard::StateRegistry registry;
              shard::Engine engine(model, shards, rank, axes, {}, registry);
              write(model.plan, engine.parameters(), start_value);
              const auto optimizer = make_optimizer(named.options, engine, axes, registry);
              std::vector<at::Tensor> kept;
              for (const shard::State& state : registry.all()) {
                if (state.role != shard::Role::gradients) kept.push_back(state.arena->flat());
              }
              body(engine, *optimizer, kept);
            };
        std::vector<at::Tensor> saved, expected;
        with_optimizer([&](shard::Engine& engine, Optimizer& optimizer, std::vector<at::Tensor>& state) {
          run_steps(optimizer, engine, 1, 20);
          for (const at::Tensor& tensor : state) saved.push_back(tensor.clone());
          run_steps(optimizer, engine, 21, kSteps);
          for (const at::Tensor& tensor : state) expected.push_back(tensor.clone());
        });
        with_optimizer([&](shard::Engine& engine, Optimizer& optimizer, std::vector<at::Tensor>& state) {
          ASSERT_EQ(state.size(), saved.size());
          for (std::size_t i = 0; i < state.size(); ++i) state[i].copy_(saved[i]);
          run_steps(optimizer, engine, 21, kSteps);
          for (std::size_t i = 0; i < state.size(); ++i) {
            EXPECT_TRUE(at::equal(state[i], expected[i])) << named.name << ", state " << i << ", rank " << rank;
          }
        });
      });
    }
  }
}

TEST(Optimizer, RegistersItsMoments) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    const auto moments_of = [&](Update update) {
      shard::StateRegistry registry;
      shard::Engine engine(model, 1, 0, axes, {}, registry);
      const auto optimizer = make_optimizer({.updates = {update, 0, {}}, .momentum = 0.9}, engine, axes, registry);
      std::vector<std::pair<std::string, std::int64_t>> moments;
      for (const shard::State& state : registry.all()) {
        if (state.role != shard::Role::moments) continue;
        moments.emplace_back(state.name, state.arena->map().real_numel());
        EXPECT_EQ(state.scope, shard::Scope::group);
      }
      return moments;
    };
    using Moments = std::vector<std::pair<std::string, std::int64_t>>;
    const std::int64_t all = model.plan.numel();
    EXPECT_EQ(moments_of(Update::adamw), (Moments{{"exp_avg", all}, {"exp_avg_sq", all}}));
    EXPECT_EQ(moments_of(Update::sgd_momentum), (Moments{{"momentum_buffer", all}}));
    EXPECT_EQ(moments_of(Update::sgd), Moments{});
    // Muon's matrices have no second moment: g, h, j, m and q.
    EXPECT_EQ(moments_of(Update::muon),
              (Moments{{"exp_avg", all}, {"exp_avg_sq", all - (2 + 29 * 31 + 13 * 3 + 2 * 150)}}));
  });
}

TEST(Optimizer, RefusesAGroupThatMatchesNothing) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    shard::StateRegistry registry;
    shard::Engine engine(model, 1, 0, axes, {}, registry);
    EXPECT_THROW(make_optimizer({.updates = {Update::adamw, 0, {{{"a", "zz*"}, 1, {}}}}}, engine, axes, registry),
                 base::UsageError);
  });
}

}  // namespace
}  // namespace fedshard::optim
