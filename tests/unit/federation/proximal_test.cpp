#include "fedshard/federation/proximal.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "fedshard/base/error.h"
#include "fedshard/plan/freeze.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::federation {
namespace {

using testing_support::on_ranks;
using testing_support::tiny_batch;

constexpr double kMu = 3;

struct Gradients {
  std::vector<at::Tensor> by_unit;  // as they are when the unit is stepped; undefined of frozen ones
  double norm = 0;
};

Gradients gradients_of(shard::Engine& engine, int rank, const shard::GradientHooks& hooks) {
  Gradients result;
  result.by_unit.resize(static_cast<std::size_t>(engine.map().units()));
  const nn::MicroBatch batch = tiny_batch(rank, 1, 6, 11);
  const auto keep = [&](int u) { result.by_unit[static_cast<std::size_t>(u)] = engine.gradients().unit(u).clone(); };
  result.norm = engine.step({&batch, 1}, keep, hooks).grad_norm;
  return result;
}

// Away from the anchor the term is mu times the way, in every layout and dtype; at the anchor it is nothing.
void expect_term(const topology::Layout& layout, shard::EngineOptions options, const std::vector<std::string>& frozen) {
  nn::Model model = testing_support::tiny_model({});
  model.plan = plan::freeze(model.plan, frozen);
  std::mutex mutex;
  on_ranks(layout, [&](int rank, comm::Axes& axes) {
    shard::StateRegistry registry;
    shard::Engine engine(model, layout.group(0).shards, layout.at(rank).shard, axes, options, registry);
    Proximal proximal(kMu, engine, registry);
    const shard::GradientHooks hooks{.add_to_mean = [&](int unit) { proximal.add_term(unit); }};
    engine.fill(testing_support::tiny_filler(engine.plan()));
    proximal.set_anchor(engine.parameters(), engine.plan());
    const Gradients at_anchor = gradients_of(engine, rank, hooks), plain_there = gradients_of(engine, rank, {});
    const at::Tensor anchor = engine.parameters().flat().to(at::kFloat, false, /*copy=*/true);
    engine.parameters().flat().mul_(1.25);
    const Gradients with = gradients_of(engine, rank, hooks), without = gradients_of(engine, rank, {});
    const at::Tensor way = engine.parameters().flat().to(at::kFloat) - anchor;
    const std::lock_guard lock(mutex);
    EXPECT_NEAR(at_anchor.norm, plain_there.norm, 1e-6 * plain_there.norm);
    EXPECT_GT(with.norm, without.norm * 1.5);
    for (int u = 0; u < engine.map().units(); ++u) {
      const auto i = static_cast<std::size_t>(u);
      EXPECT_EQ(with.by_unit[i].defined(), !model.plan.units[i].frozen);
      if (!with.by_unit[i].defined() || with.by_unit[i].numel() == 0) continue;
      const at::Tensor term = kMu * way.narrow(0, engine.map().offset(u), engine.map().shard_numel(u));
      EXPECT_TRUE(at::allclose(with.by_unit[i] - without.by_unit[i], term, 1e-5, 1e-6)) << "unit " << u;
      EXPECT_TRUE(at::allclose(at_anchor.by_unit[i], plain_there.by_unit[i], 1e-6, 1e-8)) << "unit " << u;
    }
  });
}

TEST(Proximal, AddsMuTimesTheWayFromTheAnchor) {
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {3, 1}, {2, 2}, {13, 1}}) {
    const auto layout =
        topology::Layout::make(shards * replicas, {.shard_degree = shards, .replicate_degree = replicas});
    for (const bool fused : {false, true}) {
      for (const auto master : {at::kFloat, at::kBFloat16}) {
        const shard::EngineOptions options{{.master = master}, {.fused_backward = fused}};
        expect_term(layout, options, {});
        expect_term(layout, options, {"table", "block1.*"});
      }
    }
  }
}

TEST(Proximal, RegistersItsAnchorAndWantsOneFirst) {
  nn::Model model = testing_support::tiny_model({});
  model.plan = plan::freeze(model.plan, {"table"});
  on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    shard::StateRegistry registry;
    shard::Engine engine(model, 1, 0, axes, {}, registry);
    Proximal proximal(kMu, engine, registry);
    EXPECT_EQ(registry.all().back().name, "prox_anchor");
    EXPECT_EQ(registry.all().back().role, shard::Role::anchor);
    EXPECT_EQ(registry.bytes(shard::Role::anchor), engine.gradients().map().numel() * 4);
    EXPECT_THROW(proximal.add_term(1), base::RunError);
    EXPECT_THROW(Proximal(0, engine, registry), base::RunError);
  });
}

}  // namespace
}  // namespace fedshard::federation
