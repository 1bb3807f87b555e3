#include "fedshard/shard/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <random>
#include <set>

#include "fedshard/base/error.h"
#include "fedshard/plan/check_schedule.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/plan/group_local.h"
#include "fedshard/shard/digest.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::shard {
namespace {

using testing_support::on_ranks;
using testing_support::tiny_batch;
using testing_support::tiny_model;
using testing_support::tiny_value;
using testing_support::TinyReference;
using testing_support::TinyShape;

constexpr std::int64_t kLength = 6;

struct Case {
  int shards = 1, replicas = 1;
  plan::ScheduleOptions schedule = {};
  bool tied = false;
  double max_norm = 0;
  int sequences = 12;                    // of one step, over all ranks and micro-steps
  std::vector<std::string> frozen = {};  // patterns
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  const plan::ScheduleOptions& s = c.schedule;
  out << "F" << c.shards << " R" << c.replicas << " A" << s.micro_steps << " prefetch " << s.prefetch
      << (s.reshard_after_forward ? " reshard" : " keep") << (s.recompute ? " recompute" : "")
      << (s.reduce_each_micro_step ? "" : " reduce last") << (s.fused_backward ? " fused" : "")
      << (c.tied ? " tied" : "") << " clip " << c.max_norm;
  for (const std::string& pattern : c.frozen) out << " frozen " << pattern;
  return out;
}

EngineOptions options_of(const Case& c) { return {{}, c.schedule, c.max_norm}; }

void fill(Engine& engine) { engine.fill(testing_support::tiny_filler(engine.plan())); }

// This rank's micro-batches of step `step`: its contiguous share of the step's sequences.
std::vector<nn::MicroBatch> batches_of(const Case& c, int rank, int step, int vocab) {
  const int ranks = c.shards * c.replicas, mine = c.sequences / ranks, micro = mine / c.schedule.micro_steps;
  std::vector<nn::MicroBatch> batches;
  for (int m = 0; m < c.schedule.micro_steps; ++m) {
    batches.push_back(tiny_batch(step * c.sequences + rank * mine + m * micro, micro, kLength, vocab));
  }
  return batches;
}

void expect_close(const at::Tensor& got, const at::Tensor& expected, double tolerance, const std::string& what) {
  if (expected.numel() == 0) return;
  const double scale = std::max(expected.abs().max().item<double>(), 1e-3);
  EXPECT_LE((got - expected).abs().max().item<double>() / scale, tolerance) << what;
}

constexpr double kLr = 0.3;

struct Expected {
  double loss = 0, norm = 0;
  at::Tensor gradients, parameters;  // of the whole model, of the step and after it
};

// Five steps of plain gradient descent without any sharding.
std::vector<Expected> expected_of(const Case& c, const nn::Model& whole, const std::set<std::string>& frozen,
                                  int vocab) {
  TinyReference reference(whole, frozen);
  std::vector<Expected> expected;
  for (int step = 0; step < 5; ++step) {
    Expected e{reference.backward(tiny_batch(step * c.sequences, c.sequences, kLength, vocab)), 0, {}, {}};
    e.gradients = reference.flat(true);
    e.norm = e.gradients.to(at::kDouble).norm().item<double>();
    const double clip = c.max_norm > 0 ? std::min(1.0, c.max_norm / (e.norm + 1e-6)) : 1.0;
    e.gradients = e.gradients * clip;
    reference.descend(kLr * clip);
    e.parameters = reference.flat(false).clone();
    expected.push_back(std::move(e));
  }
  return expected;
}

// Losses, norms, gradients and parameters equal the unsharded reference.
void expect_equals_reference(const Case& c) {
  SCOPED_TRACE(testing::PrintToString(c));
  const TinyShape shape{.tied = c.tied};
  const nn::Model whole = tiny_model(shape);
  nn::Model model = whole;
  model.plan = plan::freeze(whole.plan, c.frozen);
  const std::vector<Expected> expected =
      expected_of(c, whole, testing_support::names_of_frozen(model.plan), shape.vocab);
  const auto layout =
      topology::Layout::make(c.shards * c.replicas, {.shard_degree = c.shards, .replicate_degree = c.replicas});
  std::mutex checks;
  on_ranks(layout, [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, c.shards, layout.at(rank).shard, axes, options_of(c), registry);
    fill(engine);
    for (int step = 0; step < static_cast<int>(expected.size()); ++step) {
      const Expected& e = expected[step];
      const auto batches = batches_of(c, rank, step, shape.vocab);
      const StepResult result = engine.step(batches, [&](int u) {
        const std::lock_guard lock(checks);
        EXPECT_FALSE(model.plan.units[u].frozen);
        const at::Tensor right = testing_support::held_of(model.plan, u, engine.map().range(u), e.gradients);
        expect_close(engine.gradients().real(u), right, 2e-5, "gradients");
        const c10::NoGradGuard no_grad;
        engine.parameters().unit(u).sub_(engine.gradients().unit(u), kLr);
      });
      const std::lock_guard lock(checks);
      EXPECT_EQ(result.tokens, c.sequences * kLength);
      EXPECT_NEAR(result.loss, e.loss, 1e-5 * e.loss);
      EXPECT_NEAR(result.grad_norm, e.norm, 5e-5 * e.norm) << c << ", rank " << rank << ", step " << step;
      for (int u = 0; u < engine.map().units(); ++u) {
        const topology::Range held = engine.map().range(u);
        expect_close(engine.parameters().real(u), testing_support::held_of(model.plan, u, held, e.parameters), 2e-5,
                     "parameters");
        const std::int64_t padding = engine.map().shard_numel(u) - held.size();
        EXPECT_EQ(engine.parameters().unit(u).narrow(0, held.size(), padding).abs().sum().item<double>(), 0);
      }
    }
  });
}

TEST(Engine, EveryLayoutEqualsTheUnshardedModel) {
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 1}, {6, 1}, {2, 2}, {1, 4}, {3, 2}}) {
    for (const bool tied : {false, true})
      expect_equals_reference({.shards = shards, .replicas = replicas, .tied = tied});
  }
}

TEST(Engine, OptionsChangeNothingButTheOrder) {
  for (const int micro_steps : {1, 2, 3}) {
    for (const int prefetch : {0, 1, 2}) {
      for (const bool reshard : {false, true}) {
        for (const bool tied : {false, true}) {
          expect_equals_reference({.shards = 2,
                                   .schedule = {micro_steps, reshard, prefetch, micro_steps != 2, prefetch != 2},
                                   .tied = tied,
                                   .max_norm = prefetch == 1 ? 0.05 : 0.0});
        }
      }
    }
  }
}

TEST(Engine, StepsUnitsInTheirBackward) {
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {3, 1}, {2, 2}}) {
    for (const int prefetch : {0, 1, 2}) {
      for (const bool tied : {false, true}) {
        expect_equals_reference({.shards = shards,
                                 .replicas = replicas,
                                 .schedule = {.prefetch = prefetch, .recompute = tied, .fused_backward = true},
                                 .tied = tied});
      }
    }
  }
}

TEST(Engine, FrozenParametersStayAndTheOthersTrainAsEver) {
  const std::vector<std::vector<std::string>> sets{
      {"table"},           {"*.gain"},         {"projection", "block*.up"}, {"block[01].*"},
      {"table", "block*"}, {"block*", "*.up"}, {"block2.*", "gain"}};
  for (const auto& frozen : sets) {
    for (const bool tied : {false, true}) {
      if (tied && frozen[0] == "projection") continue;  // the table is the projection
      for (const int shards : {1, 3}) {
        expect_equals_reference({.shards = shards,
                                 .schedule = {.micro_steps = 2, .recompute = shards == 3},
                                 .tied = tied,
                                 .max_norm = 0.05,
                                 .frozen = frozen});
      }
      expect_equals_reference({.shards = 2,
                               .replicas = 2,
                               .schedule = {.reshard_after_forward = false, .fused_backward = true},
                               .tied = tied,
                               .frozen = frozen});
    }
  }
}

TEST(Engine, MoreShardsThanElementsOfAUnit) {
  // 13 shards of units of 77, 83 and (tied) smaller parts: many shards of the one-element kind are all padding.
  expect_equals_reference({.shards = 13, .sequences = 13});
  expect_equals_reference({.shards = 13, .tied = true, .sequences = 13});
}

TEST(Engine, MaskedTokensCountByTokensNotByMeans) {
  const nn::Model model = tiny_model({});
  nn::MicroBatch whole = tiny_batch(0, 4, kLength, 11);
  whole.labels.narrow(0, 0, 1).fill_(-100);                  // a sequence that is masked wholly
  whole.labels.narrow(0, 1, 1).narrow(1, 1, 5).fill_(-100);  // one with a single token
  TinyReference reference(model);
  const double expected = reference.backward(whole);
  const auto layout = topology::Layout::make(2, {});
  on_ranks(layout, [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, 2, rank, axes, {{}, {2, true, 1}, 0}, registry);
    fill(engine);
    std::vector<nn::MicroBatch> mine;
    for (int m = 0; m < 2; ++m) {
      mine.push_back({whole.tokens.narrow(0, 2 * rank + m, 1), whole.labels.narrow(0, 2 * rank + m, 1)});
    }
    const StepResult result = engine.step(mine, [](int) {});
    EXPECT_EQ(result.tokens, 1 + 2 * kLength);
    EXPECT_NEAR(result.loss, expected, 1e-5 * expected);
    for (int u = 0; u < engine.map().units(); ++u) {
      const at::Tensor right = testing_support::held_of(model.plan, u, engine.map().range(u), reference.flat(true));
      expect_close(engine.gradients().real(u), right, 2e-5, "mask");
    }
  });
}

TEST(Engine, ComputesInBf16WithFp32Sums) {
  const nn::Model model = tiny_model({});
  TinyReference reference(model);
  const double expected = reference.backward(tiny_batch(0, 4, kLength, 11));
  for (const auto reduce : {at::kFloat, at::kBFloat16}) {
    on_ranks(topology::Layout::make(2, {}), [&](int rank, comm::Axes& axes) {
      StateRegistry registry;
      Engine engine(model, 2, rank, axes, {{at::kBFloat16, reduce}, {1, true, 1}, 0}, registry);
      fill(engine);
      const auto batch = tiny_batch(2 * rank, 2, kLength, 11);
      const StepResult result = engine.step({&batch, 1}, [](int) {});
      EXPECT_NEAR(result.loss, expected, 0.02 * expected);
      for (int u = 0; u < engine.map().units(); ++u) {
        const at::Tensor right = testing_support::held_of(model.plan, u, engine.map().range(u), reference.flat(true));
        expect_close(engine.gradients().real(u), right, 0.05, "bf16");
      }
    });
  }
}

TEST(Engine, EvaluatesOtherParametersWithoutTouchingItsOwn) {
  const nn::Model model = tiny_model({.tied = true});
  TinyReference reference(model);
  const double own = reference.backward(tiny_batch(0, 2, kLength, 11));
  on_ranks(topology::Layout::make(2, {}), [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, 2, rank, axes, {}, registry);
    fill(engine);
    const Arena zeros(engine.map());
    const auto batch = tiny_batch(rank, 1, kLength, 11);
    const LossSum uniform = engine.evaluate(batch, zeros);
    EXPECT_NEAR(uniform.loss, kLength * std::log(11.0), 1e-4);
    EXPECT_EQ(uniform.tokens, kLength);
    std::vector<double> sum{engine.evaluate(batch, engine.parameters()).loss};
    axes.group->sum(sum);
    EXPECT_NEAR(sum[0] / (2 * kLength), own, 1e-5);
  });
}

TEST(Engine, SendsWhatTheFormulasSay) {
  const nn::Model whole = tiny_model({});
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {3, 1}, {2, 2}, {1, 3}}) {
    for (const bool reshard : {false, true}) {
      for (const bool each : {false, true}) {
        for (const auto& frozen : {std::vector<std::string>{}, {"block0.*", "*.gain"}, {"table", "block[01].*"}}) {
          nn::Model model = whole;
          model.plan = plan::freeze(whole.plan, frozen);
          const Case c{
              shards,
              replicas,
              {.micro_steps = 2, .reshard_after_forward = reshard, .recompute = each, .reduce_each_micro_step = each}};
          SCOPED_TRACE(testing::PrintToString(c));
          const auto layout =
              topology::Layout::make(shards * replicas, {.shard_degree = shards, .replicate_degree = replicas});
          const auto traffic = on_ranks(layout, [&](int rank, comm::Axes& axes) {
            StateRegistry registry;
            Engine engine(model, shards, layout.at(rank).shard, axes, options_of(c), registry);
            fill(engine);
            engine.step(batches_of(c, rank, 0, 11), [](int) {});
          });
          // By hand: gathers a micro-step, and reductions a step. Backward begins where something trains.
          const std::size_t first_trained = frozen.empty() ? 0 : frozen[0] == "table" ? 3 : 0;
          std::int64_t gather = 0, reduce = 0, replica = 0;
          for (std::size_t u = 0; u < model.plan.units.size(); ++u) {
            const auto& unit = model.plan.units[u];
            const std::int64_t s = unit.shard_numel(shards);
            const std::string& first = unit.parameters[0].name;
            const bool block = first.starts_with("block");
            const bool has_backward = block && static_cast<std::size_t>(first[5] - '0') + 1 >= first_trained;
            gather += 2 * layout.world() * (shards - 1) * s * (reshard && has_backward ? 2 : 1) * 4;
            if (unit.frozen) continue;
            reduce += (each ? 2 : 1) * layout.world() * (shards - 1) * s * 4;
            replica += (each ? 2 : 1) * shards * 2 * (replicas - 1) * s * 4;
          }
          EXPECT_EQ(traffic.of(comm::Purpose::gather), gather);
          EXPECT_EQ(traffic.of(comm::Purpose::reduce), reduce);
          EXPECT_EQ(traffic.of(comm::Purpose::replica), replica);
          EXPECT_EQ(traffic.inter_group, 0);
        }
      }
    }
  }
}

TEST(Engine, ARealRunFollowsTheProvenSchedule) {
  const nn::Model model = tiny_model({});
  on_ranks(topology::Layout::make(2, {}), [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, 2, rank, axes, {{}, {2, true, 1}, 0}, registry);
    fill(engine);
    plan::Schedule recorded;
    engine.observe([&](const plan::Op& op, double begin, double end) {
      EXPECT_LE(begin, end);
      recorded.push_back(op);
    });
    engine.step(batches_of({.shards = 2, .schedule = {.micro_steps = 2}}, rank, 0, 11), [](int) {});
    EXPECT_EQ(plan::check_step_schedule(model.plan, {2, true, 1}, recorded), std::vector<std::string>{});
  });
}

TEST(Engine, NonFiniteGradientsStopEveryRank) {
  const nn::Model model = tiny_model({});
  std::mutex mutex;
  int stopped = 0;
  on_ranks(topology::Layout::make(2, {}), [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, 2, rank, axes, {}, registry);
    engine.fill([&](int, topology::Range, std::span<float> out) {
      std::fill(out.begin(), out.end(), rank == 1 ? std::nanf("") : 0.1f);
    });
    const auto batch = tiny_batch(rank, 1, kLength, 11);
    try {
      engine.step({&batch, 1}, [](int) { ADD_FAILURE() << "an optimizer step with NaN"; });
    } catch (const base::RunError& e) {
      EXPECT_NE(std::string(e.what()).find("not finite"), std::string::npos);
      const std::lock_guard lock(mutex);
      ++stopped;
    }
  });
  EXPECT_EQ(stopped, 2);
}

TEST(Engine, SkipsAStepWithNaNOnEveryRankAlike) {
  const nn::Model model = tiny_model({});
  // A run of three steps of which rank 2 spoils the second, against a run without that step.
  const auto run = [&](bool spoilt) {
    std::mutex mutex;
    std::vector<at::Tensor> parameters(4);
    on_ranks(topology::Layout::make(4, {.shard_degree = 2, .replicate_degree = 2}), [&](int rank, comm::Axes& axes) {
      StateRegistry registry;
      nn::Model mine = model;
      bool spoil = false;
      const nn::StageFunction head = model.stages.back();
      mine.stages.back() = [&](nn::Parameters p, const at::Tensor& x, const nn::MicroBatch& batch) {
        return spoil ? head(p, x, batch) * std::nan("") : head(p, x, batch);
      };
      Engine engine(mine, 2, rank % 2, axes, {{}, {2, true, 1}, 1.0, NonFinite::skip}, registry);
      fill(engine);
      for (const int step : {0, 1, 2}) {
        if (step == 1 && !spoilt) continue;
        spoil = step == 1 && rank == 2;
        const Case c{.shards = 2, .replicas = 2, .schedule = {.micro_steps = 2}, .sequences = 8};
        const StepResult result = engine.step(batches_of(c, rank, step, 11), [&](int u) {
          const c10::NoGradGuard no_grad;
          engine.parameters().unit(u).sub_(engine.gradients().unit(u), kLr);
        });
        EXPECT_EQ(result.skipped, step == 1);
        EXPECT_EQ(std::isfinite(result.loss), step != 1);
      }
      const std::lock_guard lock(mutex);
      parameters[rank] = engine.parameters().flat().clone();
    });
    return parameters;
  };
  const auto with = run(true), without = run(false);
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(at::equal(with[rank], without[rank])) << rank;
}

TEST(Digest, IsTheSameForEveryLayoutAndSeesEveryBit) {
  const nn::Model model = tiny_model({});
  std::vector<std::uint64_t> digests;
  for (const int shards : {1, 2, 3, 5, 17}) {
    std::uint64_t sum = 0;
    for (int shard = 0; shard < shards; ++shard) {
      const ArenaMap map(model.plan, shards, shard);
      const Arena arena(map);
      for (int u = 0; u < map.units(); ++u) {
        for (std::int64_t i = 0; i < map.range(u).size(); ++i) {
          arena.real(u).data_ptr<float>()[i] = tiny_value(model.plan.global_offset(u) + map.range(u).begin + i);
        }
      }
      sum += partial_digest(model.plan, arena);
    }
    digests.push_back(sum);
    EXPECT_EQ(sum, digests[0]) << shards << " shards";
  }
  const ArenaMap map(model.plan, 1, 0);
  const Arena arena(map);
  const std::uint64_t zero = partial_digest(model.plan, arena);
  arena.real(0).data_ptr<float>()[3] = -0.0f;
  EXPECT_NE(partial_digest(model.plan, arena), zero);
  // Swapping two different values is seen too.
  EXPECT_NE(mix(1, 7) + mix(2, 9), mix(1, 9) + mix(2, 7));
}

TEST(Registry, CountsBytesByRole) {
  const nn::Model model = tiny_model({});
  on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    StateRegistry registry;
    const Engine engine(model, 1, 0, axes, {}, registry);
    EXPECT_EQ(registry.bytes(Role::parameters), engine.map().numel() * 4);
    EXPECT_EQ(registry.bytes(Role::moments), 0);
    EXPECT_THROW(registry.add("parameters", Role::parameters, Scope::shared, engine.parameters()), base::RunError);
  });
}

TEST(Registry, TellsGroupLocalParametersFromSharedOnes) {
  nn::Model model = tiny_model({});
  model.plan = plan::keep_in_groups(plan::freeze(model.plan, {"projection"}), {{}, {"*.gain", "table"}});
  on_ranks(topology::Layout::make(2, {}), [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    const Engine engine(model, 2, rank, axes, {}, registry);
    // What only some elements have, as some moments, knows it too.
    std::vector<std::vector<topology::Range>> kept(model.plan.units.size());
    const ArenaMap parts(engine.map(), kept);
    const Arena rank_own(parts);
    registry.add("parts", Role::outer_moments, Scope::shared, rank_own);
    registry.add("residual", Role::residuals, Scope::rank, rank_own);
    for (int u = 0; u < engine.map().units(); ++u) {
      const Scope expected = model.plan.units[u].group_local ? Scope::group : Scope::shared;
      EXPECT_EQ(registry.all()[0].scope_of(u), expected) << model.plan.units[u].name;
      EXPECT_EQ(registry.all()[1].scope_of(u), Scope::group);  // gradients
      EXPECT_EQ(registry.all()[2].scope_of(u), expected);
      EXPECT_EQ(registry.all()[3].scope_of(u), Scope::rank);
    }
  });
}

}  // namespace
}  // namespace fedshard::shard
