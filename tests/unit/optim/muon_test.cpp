#include "fedshard/optim/muon.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/memory_meter.h"
#include "tests/unit/optim/optimizer_problem.h"

namespace fedshard::optim {
namespace {

using plan::Update;

OptimizerOptions muon_options() { return {.updates = {Update::muon, 0.1, {}}, .momentum = 0.95, .nesterov = true}; }

at::Tensor random_matrix(std::int64_t rows, std::int64_t columns) {
  const auto index = at::arange(rows * columns, at::kFloat);
  return at::sin(index * index * 0.37 + 0.1).view({rows, columns});
}

TEST(Orthogonalize, BringsSingularValuesNearOne) {
  for (const auto& [rows, columns] : std::vector<std::pair<std::int64_t, std::int64_t>>{{7, 7}, {5, 23}, {23, 5}}) {
    const at::Tensor result = orthogonalize(1000 * random_matrix(rows, columns));
    EXPECT_EQ(result.scalar_type(), at::kBFloat16);
    EXPECT_EQ(result.sizes(), (std::vector<std::int64_t>{rows, columns}));
    const at::Tensor values = std::get<1>(at::linalg_svd(result.to(at::kDouble)));
    EXPECT_GT(values.min().item<double>(), 0.5) << values;
    EXPECT_LT(values.max().item<double>(), 1.5) << values;
  }
}

TEST(Orthogonalize, DoesNotMindShapeScaleOrZeros) {
  const at::Tensor wide = random_matrix(3, 11);
  EXPECT_TRUE(at::equal(orthogonalize(wide.t().contiguous()), orthogonalize(wide).t()));
  EXPECT_TRUE(at::equal(orthogonalize(wide * 1024), orthogonalize(wide)));
  EXPECT_TRUE(at::equal(orthogonalize(at::zeros({4, 6})), at::zeros({4, 6}, at::kBFloat16)));
  EXPECT_NEAR(std::abs(orthogonalize(at::full({1, 1}, -3.0f)).item<double>()), 1, 0.5);
}

TEST(Orthogonalize, LeavesItsArgumentAlone) {
  const at::Tensor matrix = random_matrix(4, 6).to(at::kBFloat16), before = matrix.clone();
  orthogonalize(matrix);
  EXPECT_TRUE(at::equal(matrix, before));
}

// Every rank computes on the same whole matrices, wherever they are cut.
TEST(Muon, MatricesHaveTheSameBitsForEveryShardCount) {
  const plan::ModelPlan plan = units_of_parameters().plan;
  for (const bool nesterov : {false, true}) {
    OptimizerOptions options = muon_options();
    options.nesterov = nesterov;
    const std::vector<float> whole = sharded_result(options, 1);
    for (const int shards : {2, 3, 4, 5, 7}) {
      const std::vector<float> got = sharded_result(options, shards);
      std::int64_t index = 0;
      for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
        for (int p = 0; p < static_cast<int>(plan.units[u].parameters.size()); ++p) {
          for (std::int64_t i = 0; i < plan.units[u].parameters[p].numel(); ++i, ++index) {
            if (!plan::is_muon_matrix(plan, u, p)) continue;
            ASSERT_EQ(got[static_cast<std::size_t>(index)], whole[static_cast<std::size_t>(index)])
                << shards << " shards, element " << i << " of " << plan.units[u].parameters[p].name;
          }
        }
      }
    }
  }
}

// An update moves an m x n matrix by lr * 0.2 sqrt(max(m, n)) times a matrix of singular values near 1: its root mean
// square is near 0.2 lr, like AdamW's.
TEST(Muon, MovesMatricesAsFarAsAdamWWould) {
  const nn::Model model = units_of_parameters();
  testing_support::on_ranks(topology::Layout::make(1, {}), [&](int, comm::Axes& axes) {
    shard::StateRegistry registry;
    shard::Engine engine(model, 1, 0, axes, {}, registry);
    write(model.plan, engine.gradients(), [](std::int64_t index) { return gradient_value(index, 1); });
    make_optimizer(muon_options(), engine, axes, registry)->step(3, 1, 0.01);
    const at::Tensor moved = engine.parameters().real(3).narrow(0, 0, 29 * 31);
    EXPECT_NEAR(moved.square().mean().sqrt().item<double>() / 0.01, 0.2, 0.06);
  });
}

// plan/updates.h states the bytes; the communicator counts them. Of the units only "two", "large" and "wide" have
// matrices that Muon is meant for.
TEST(Muon, SendsTheBytesOfTheClosedForm) {
  const nn::Model model = units_of_parameters();
  const plan::UpdateRules rules = plan::update_rules(model.plan, muon_options().updates);
  for (const int shards : {1, 2, 3, 5}) {
    for (const int replicas : {1, 2}) {
      const auto layout = topology::Layout::make(shards * replicas,
                                                 {.groups = 1, .shard_degree = shards, .replicate_degree = replicas});
      const comm::Traffic traffic = testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
        shard::StateRegistry registry;
        shard::Engine engine(model, shards, layout.at(rank).shard, axes, {}, registry);
        const auto optimizer = make_optimizer(muon_options(), engine, axes, registry);
        run_steps(*optimizer, engine, 1, 3);
      });
      std::int64_t elements = 0;
      for (const std::int64_t numel : {2, 29 * 31 + 97 + 39, 150 + 7 + 12 + 150}) {
        elements += (numel + shards - 1) / shards;
      }
      EXPECT_EQ(traffic.of(comm::Purpose::gather), 3 * replicas * shards * (shards - 1) * elements * 4);
      EXPECT_EQ(traffic.of(comm::Purpose::gather), 3 * replicas * plan::update_bytes(model.plan, rules, shards));
      EXPECT_EQ(traffic.inter_group + traffic.intra_group, traffic.of(comm::Purpose::gather));
    }
  }
}

// One block of sizes at which nothing but the matrices counts, between an embedding and a head.
nn::Model model_with_a_block() {
  nn::Model model;
  model.plan.units = {{"embedding", {{"table", {128, 64}, {}}}},
                      {"block", {{"norm", {64}, {}}, {"up", {384, 128}, {}}, {"down", {128, 256}, {}}}},
                      {"head", {{"projection", {128, 64}, {}}}}};
  for (int u = 0; u < 3; ++u) {
    model.plan.stages.push_back({model.plan.units[u].name, {u}});
    model.stages.push_back([](nn::Parameters, const at::Tensor& x, const nn::MicroBatch&) { return x; });
  }
  return model;
}

TEST(Muon, TakesTheMemoryThatIsStated) {
  const nn::Model model = model_with_a_block();
  const OptimizerOptions options = muon_options();
  const plan::UpdateRules rules = plan::update_rules(model.plan, options.updates);
  for (const int shards : {1, 2, 3}) {
    std::mutex mutex;
    std::int64_t moments = 0, peak = 0;
    testing_support::on_ranks(topology::Layout::make(shards, {}), [&](int rank, comm::Axes& axes) {
      shard::StateRegistry registry;
      shard::Engine engine(model, shards, rank, axes, {}, registry);
      write(model.plan, engine.gradients(), [](std::int64_t index) { return gradient_value(index, 1); });
      const testing_support::MemoryMeter meter;
      const auto optimizer = make_optimizer(options, engine, axes, registry);
      for (int u = 0; u < 3; ++u) optimizer->step(u, 1, 0.01);
      const std::lock_guard lock(mutex);
      moments = std::max(moments, registry.bytes(shard::Role::moments));
      peak = std::max(peak, meter.peak());
    });
    EXPECT_EQ(moments, plan::moment_bytes(model.plan, rules, shards));
    const std::int64_t stated = moments + plan::update_workspace_bytes(model.plan, rules, shards);
    // The matrix product of this machine may do without its copies of 384 x 128 and 128 x 128.
    const std::int64_t copies = (384 * 128 + 128 * 128) * 2;
    EXPECT_GT(peak, (stated - copies) * 99 / 100) << shards << " shards";
    EXPECT_LT(peak, stated * 101 / 100) << shards << " shards";
  }
}

}  // namespace
}  // namespace fedshard::optim
