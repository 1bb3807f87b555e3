#include "fedshard/plan/memory.h"

#include <gtest/gtest.h>

#include <mutex>

#include "fedshard/plan/freeze.h"
#include "fedshard/plan/group_local.h"
#include "fedshard/shard/engine.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::shard {
namespace {

using plan::MemoryPurpose;
using testing_support::tiny_batch;
using testing_support::tiny_model;
using testing_support::TinyShape;

TEST(BufferPool, KeepsOnlyWhatSeveralOwnersShare) {
  BufferPool pool;
  FlatBuffer block0(10, at::kFloat, at::kCPU, pool, 0), block1(10, at::kFloat, at::kCPU, pool, 1);
  FlatBuffer head(100, at::kFloat, at::kCPU, pool, 2);
  EXPECT_EQ(pool.bytes(), 0);
  block0.acquire();
  head.acquire();
  EXPECT_EQ(pool.bytes(), 440);
  block0.drop();
  EXPECT_EQ(pool.bytes(), 440);  // kept
  head.drop();
  EXPECT_EQ(pool.bytes(), 40);  // freed
  block1.acquire();
  EXPECT_EQ(pool.bytes(), 40);  // block 0's
  block0.acquire();
  EXPECT_EQ(pool.bytes(), 80);
  EXPECT_EQ(pool.peak_bytes(), 440);
  head.acquire();
  EXPECT_EQ(pool.peak_bytes(), 480);
}

TEST(BufferPool, TwoBuffersOfOneOwnerAreNotShared) {
  BufferPool pool;
  FlatBuffer gathered(10, at::kFloat, at::kCPU, pool, 0), gradients(10, at::kFloat, at::kCPU, pool, 0);
  gathered.acquire();
  gradients.acquire();
  EXPECT_EQ(pool.bytes(), 80);
  gathered.drop();
  EXPECT_EQ(pool.bytes(), 40);
  gradients.drop();
  EXPECT_EQ(pool.bytes(), 0);
  // The same size in another dtype, for another owner: now it is shared.
  const FlatBuffer other(20, at::kBFloat16, at::kCPU, pool, 1);
  gathered.acquire();
  gathered.drop();
  EXPECT_EQ(pool.bytes(), 40);
  EXPECT_EQ(pool.peak_bytes(), 80);
}

TEST(BufferPool, BuffersThatEndWhilePresentGiveTheirBytesBack) {
  BufferPool pool;
  {
    FlatBuffer buffer(10, at::kFloat, at::kCPU, pool, 0);
    buffer.acquire();
  }
  EXPECT_EQ(pool.bytes(), 0);
  EXPECT_EQ(pool.peak_bytes(), 40);
}

struct Case {
  TinyShape shape;
  int shards = 1, replicas = 1;
  UnitDtypes dtypes;
  plan::ScheduleOptions schedule;
  std::vector<std::string> frozen = {}, group_local = {};
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "vocabulary " << c.shape.vocab << ", " << c.shape.blocks << " blocks" << (c.shape.tied ? " tied" : "")
             << ", F" << c.shards << " R" << c.replicas << ", " << c.dtypes.compute << " " << c.dtypes.reduce << ", "
             << c.schedule.micro_steps << " micro-steps, prefetch " << c.schedule.prefetch
             << (c.schedule.reshard_after_forward ? " reshard" : " keep")
             << (c.schedule.reduce_each_micro_step ? "" : " reduce last") << (c.schedule.fused_backward ? " fused" : "")
             << (c.frozen.empty() ? "" : " frozen " + c.frozen[0])
             << (c.group_local.empty() ? "" : " group-local " + c.group_local[0]);
}

// Three steps with an evaluation between them: the peak that the engine's pool and arenas reach is the predicted one.
void expect_predicted(const Case& c) {
  SCOPED_TRACE(testing::PrintToString(c));
  nn::Model model = tiny_model(c.shape);
  model.plan = plan::keep_in_groups(plan::freeze(model.plan, c.frozen), {{}, c.group_local});
  const plan::MemoryTable table =
      plan::predict_memory(model.plan, {.shards = c.shards,
                                        .replicas = c.replicas,
                                        .master_bytes = static_cast<int>(c10::elementSize(c.dtypes.master)),
                                        .compute_bytes = static_cast<int>(c10::elementSize(c.dtypes.compute)),
                                        .reduce_bytes = static_cast<int>(c10::elementSize(c.dtypes.reduce)),
                                        .schedule = c.schedule});
  const auto layout =
      topology::Layout::make(c.shards * c.replicas, {.shard_degree = c.shards, .replicate_degree = c.replicas});
  std::mutex checks;
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    StateRegistry registry;
    Engine engine(model, c.shards, layout.at(rank).shard, axes, {c.dtypes, c.schedule, 0}, registry);
    const std::vector<nn::MicroBatch> batches(static_cast<std::size_t>(c.schedule.micro_steps),
                                              tiny_batch(rank, 1, 3, c.shape.vocab));
    for (int step = 0; step < 3; ++step) {
      engine.step(batches, [](int) {});
      engine.evaluate(batches[0], engine.parameters());
    }
    const std::lock_guard lock(checks);
    EXPECT_EQ(engine.peak_buffer_bytes(), table.peak_buffers);
    EXPECT_EQ(registry.bytes(Role::parameters), table.bytes(MemoryPurpose::parameters));
    EXPECT_EQ(registry.bytes(Role::gradients), table.bytes(MemoryPurpose::gradients));
  });
}

TEST(Memory, PeakIsPredictedForEveryLayout) {
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {2, 1}, {3, 1}, {13, 1}, {2, 2}, {1, 4}}) {
    for (const bool tied : {false, true}) expect_predicted({{.tied = tied}, shards, replicas, {}, {}});
  }
}

TEST(Memory, PeakIsPredictedForEveryScheduleAndDtype) {
  const UnitDtypes dtypes[] = {
      {at::kFloat, at::kFloat}, {at::kBFloat16, at::kFloat}, {at::kBFloat16, at::kBFloat16, at::kBFloat16}};
  for (const UnitDtypes& of_case : dtypes) {
    for (const int micro_steps : {1, 2, 3}) {
      for (const int prefetch : {0, 1, 2, 20}) {
        for (const bool reshard : {false, true}) {
          for (const bool tied : {false, true}) {
            for (const bool each : {false, true}) {
              expect_predicted({{.tied = tied}, 2, 1, of_case, {micro_steps, reshard, prefetch, false, each}});
            }
          }
        }
      }
    }
  }
}

TEST(Memory, PeakIsPredictedWithFrozenPartsRecomputingAndFusedSteps) {
  for (const auto& frozen : {std::vector<std::string>{}, {"*.gain"}, {"table"}, {"table", "block0.*"}, {"block1.*"}}) {
    for (const bool tied : {false, true}) {
      for (const bool recompute : {false, true}) {
        expect_predicted({{.tied = tied}, 3, 1, {}, {2, true, 1, recompute}, frozen});
        expect_predicted({{.tied = tied}, 2, 2, {}, {1, true, 1, recompute, true, true}, frozen});
      }
    }
  }
}

// Two units that train in one stage: their reductions run side by side.
TEST(Memory, PeakIsPredictedWithGroupLocalParts) {
  for (const auto& local : {std::vector<std::string>{"*.gain"}, {"table"}, {"*.up", "block1.down"}}) {
    for (const bool tied : {false, true}) {
      for (const bool each : {false, true}) {
        expect_predicted({{.tied = tied}, 3, 1, {}, {2, true, 1, false, each}, {}, local});
        expect_predicted({{.tied = tied}, 2, 2, {}, {3, true, 2, true, each}, {"block0.*"}, local});
      }
      expect_predicted({{.tied = tied}, 2, 2, {}, {1, true, 1, false, true, true}, {"*.scale"}, local});
    }
  }
}

TEST(Memory, PeakIsPredictedForModelsOfManySizes) {
  for (const int vocab : {2, 11, 101}) {
    for (const int blocks : {0, 1, 2, 7}) {
      for (const bool tied : {false, true}) {
        expect_predicted({{.vocab = vocab, .blocks = blocks, .tied = tied}, 3, 1, {at::kBFloat16, at::kFloat}, {}});
      }
    }
  }
}

}  // namespace
}  // namespace fedshard::shard
