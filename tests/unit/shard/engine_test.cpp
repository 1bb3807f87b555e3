#include "fedshard/shard/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <random>

#include "fedshard/base/error.h"
#include "fedshard/plan/check_schedule.h"
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
  int shards = 1, replicas = 1, micro_steps = 1, prefetch = 1;
  bool reshard = true, tied = false;
  double max_norm = 0;
  int sequences = 12;  // of one step, over all ranks and micro-steps
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "F" << c.shards << " R" << c.replicas << " A" << c.micro_steps << " prefetch " << c.prefetch
             << (c.reshard ? " reshard" : " keep") << (c.tied ? " tied" : "") << " clip " << c.max_norm;
}

EngineOptions options_of(const Case& c) { return {{}, {c.micro_steps, c.reshard, c.prefetch}, c.max_norm}; }

void fill(Engine& engine) {
  engine.fill([&](int unit, topology::Range range, std::span<float> out) {
    const std::int64_t base = engine.plan().global_offset(unit);
    for (std::int64_t i = range.begin; i < range.end; ++i) out[i - range.begin] = tiny_value(base + i);
  });
}

// This rank's micro-batches of step `step`: its contiguous share of the step's sequences.
std::vector<nn::MicroBatch> batches_of(const Case& c, int rank, int step, int vocab) {
  const int ranks = c.shards * c.replicas, mine = c.sequences / ranks, micro = mine / c.micro_steps;
  std::vector<nn::MicroBatch> batches;
  for (int m = 0; m < c.micro_steps; ++m) {
    batches.push_back(tiny_batch(step * c.sequences + rank * mine + m * micro, micro, kLength, vocab));
  }
  return batches;
}

void expect_close(const at::Tensor& got, const at::Tensor& expected, double tolerance, const std::string& what) {
  if (expected.numel() == 0) return;
  const double scale = std::max(expected.abs().max().item<double>(), 1e-3);
  EXPECT_LE((got - expected).abs().max().item<double>() / scale, tolerance) << what;
}

// Five steps of plain gradient descent: losses, norms, gradients and parameters equal the unsharded reference.
void expect_equals_reference(const Case& c) {
  SCOPED_TRACE(testing::PrintToString(c));
  constexpr double kLr = 0.3;
  constexpr int kSteps = 5;
  const TinyShape shape{.tied = c.tied};
  const nn::Model model = tiny_model(shape);
  TinyReference reference(model);
  struct Expected {
    double loss, norm;
    std::vector<at::Tensor> gradients, parameters;  // by unit, of the step and after it
  };
  std::vector<Expected> expected;
  for (int step = 0; step < kSteps; ++step) {
    Expected e{reference.backward(tiny_batch(step * c.sequences, c.sequences, kLength, shape.vocab)), 0, {}, {}};
    double squares = 0;
    for (int u = 0; u < static_cast<int>(model.plan.units.size()); ++u) {
      squares += reference.flat_unit(u, true).to(at::kDouble).square().sum().item<double>();
    }
    e.norm = std::sqrt(squares);
    const double clip = c.max_norm > 0 ? std::min(1.0, c.max_norm / (e.norm + 1e-6)) : 1.0;
    for (int u = 0; u < static_cast<int>(model.plan.units.size()); ++u) {
      e.gradients.push_back(reference.flat_unit(u, true) * clip);
      const c10::NoGradGuard no_grad;
      for (at::Tensor& p : reference.parameters()[u]) p.sub_(p.grad(), kLr * clip);
      e.parameters.push_back(reference.flat_unit(u, false).clone());
    }
    expected.push_back(std::move(e));
  }
  const auto layout =
      topology::Layout::make(c.shards * c.replicas, {.shard_degree = c.shards, .replicate_degree = c.replicas});
  std::mutex checks;
  on_ranks(layout, [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, c.shards, layout.at(rank).shard, axes, options_of(c), registry);
    fill(engine);
    for (int step = 0; step < kSteps; ++step) {
      const auto batches = batches_of(c, rank, step, shape.vocab);
      const StepResult result = engine.step(batches, [&](int unit) {
        const c10::NoGradGuard no_grad;
        engine.parameters().unit(unit).sub_(engine.gradients().unit(unit), kLr);
      });
      const std::lock_guard lock(checks);
      const Expected& e = expected[step];
      EXPECT_EQ(result.tokens, c.sequences * kLength);
      EXPECT_NEAR(result.loss, e.loss, 1e-5 * e.loss);
      EXPECT_NEAR(result.grad_norm, e.norm, 5e-5 * e.norm) << c << ", rank " << rank << ", step " << step;
      for (int u = 0; u < engine.map().units(); ++u) {
        const topology::Range held = engine.map().range(u);
        expect_close(engine.gradients().real(u), e.gradients[u].slice(0, held.begin, held.end), 2e-5, "gradients");
        expect_close(engine.parameters().real(u), e.parameters[u].slice(0, held.begin, held.end), 2e-5, "parameters");
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
                                   .micro_steps = micro_steps,
                                   .prefetch = prefetch,
                                   .reshard = reshard,
                                   .tied = tied,
                                   .max_norm = prefetch == 1 ? 0.05 : 0.0});
        }
      }
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
      const topology::Range held = engine.map().range(u);
      expect_close(engine.gradients().real(u), reference.flat_unit(u, true).slice(0, held.begin, held.end), 2e-5,
                   "mask");
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
        const topology::Range held = engine.map().range(u);
        expect_close(engine.gradients().real(u), reference.flat_unit(u, true).slice(0, held.begin, held.end), 0.05,
                     "bf16");
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
  const nn::Model model = tiny_model({});
  const auto& units = model.plan.units;
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {3, 1}, {2, 2}, {1, 3}}) {
    for (const bool reshard : {false, true}) {
      const int micro_steps = 2;
      const auto layout =
          topology::Layout::make(shards * replicas, {.shard_degree = shards, .replicate_degree = replicas});
      const auto traffic = on_ranks(layout, [&](int rank, comm::Axes& axes) {
        StateRegistry registry;
        Engine engine(model, shards, layout.at(rank).shard, axes, {{}, {micro_steps, reshard, 1}, 0}, registry);
        fill(engine);
        const Case c{.shards = shards, .replicas = replicas, .micro_steps = micro_steps};
        engine.step(batches_of(c, rank, 0, 11), [](int) {});
      });
      std::int64_t gather = 0, reduce = 0, replica = 0;
      for (std::size_t u = 0; u < units.size(); ++u) {
        const std::int64_t s = units[u].shard_numel(shards);
        const int gathers = reshard && u > 0 && u + 1 < units.size() ? 2 : 1;
        gather += micro_steps * layout.world() * (shards - 1) * s * gathers * 4;
        reduce += micro_steps * layout.world() * (shards - 1) * s * 4;
        replica += micro_steps * shards * 2 * (replicas - 1) * s * 4;
      }
      EXPECT_EQ(traffic.of(comm::Purpose::gather), gather);
      EXPECT_EQ(traffic.of(comm::Purpose::reduce), reduce);
      EXPECT_EQ(traffic.of(comm::Purpose::replica), replica);
      EXPECT_EQ(traffic.inter_group, 0);
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
    engine.step(batches_of({.shards = 2, .micro_steps = 2}, rank, 0, 11), [](int) {});
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

}  // namespace
}  // namespace fedshard::shard
