#include "fedshard/plan/memory.h"

#include <gtest/gtest.h>

#include "fedshard/base/error.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::plan {
namespace {

using topology::Layout;

// Units of so many elements each, used by a stage each.
ModelPlan plan_of(const std::vector<std::int64_t>& sizes) {
  ModelPlan plan;
  for (const std::int64_t size : sizes) {
    const std::string name = "u" + std::to_string(plan.units.size());
    plan.stages.push_back({name, {static_cast<int>(plan.units.size())}});
    plan.units.push_back({name, {{name + ".w", {size}, {}}}});
  }
  plan.stages[0].backward_reads_parameters = false;
  return plan;
}

std::vector<std::int64_t> bytes_of(const MemoryTable& table) {
  std::vector<std::int64_t> bytes;
  for (const MemoryRow& row : table.rows) bytes.push_back(row.bytes);
  return bytes;
}

TEST(Memory, OneRankByHand) {
  // Arenas round each unit up to a multiple of 16 elements.
  const ModelPlan plan = plan_of({24, 10, 10, 10, 30});
  const MemoryTable table = predict_memory(plan, {.compute_bytes = 2,
                                                  .shared_activation_bytes = 1000,
                                                  .schedule = {.reshard_after_forward = true, .prefetch = 0}});
  constexpr std::int64_t kArena = (32 + 16 + 16 + 16 + 32) * 4;
  // Most is allocated while the head computes its backward: the head's own 30 * 2 and 30 * 4 bytes; and, left from the
  // step before, one gathered block and two blocks' gradients.
  EXPECT_EQ(bytes_of(table),
            (std::vector<std::int64_t>{kArena, kArena, 2 * kArena, 60 + 20, 120 + 2 * 40, 1000, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(table.peak, 4 * kArena + 80 + 200 + 1000);
}

TEST(Memory, SizesOfOneUnitAreNotKept) {
  // One block alone: its buffers are freed like the embedding's and the head's.
  const MemoryTable table = predict_memory(plan_of({20, 10, 30}), {.schedule = {.prefetch = 0}});
  // The head's backward, with nothing beside its own two buffers.
  EXPECT_EQ(table.bytes(MemoryPurpose::gathered), 30 * 4);
  EXPECT_EQ(table.bytes(MemoryPurpose::gradient_buffers), 30 * 4);
}

TEST(Memory, WithoutReshardingEveryUnitStaysGathered) {
  const ModelPlan plan = plan_of({8, 8, 8, 8, 8, 8, 8});
  for (const int shards : {1, 3}) {
    MemoryOptions options{.shards = shards, .schedule = {.reshard_after_forward = false, .prefetch = 0}};
    // All but the embedding, which its backward doesn't read.
    EXPECT_EQ(predict_memory(plan, options).bytes(MemoryPurpose::gathered),
              6 * shards * ((8 + shards - 1) / shards) * 4);
    options.schedule.reshard_after_forward = true;
    EXPECT_EQ(predict_memory(plan, options).bytes(MemoryPurpose::gathered),
              1 * shards * ((8 + shards - 1) / shards) * 4);
  }
}

TEST(Memory, MomentsAndCommunicationFollowTheOptions) {
  const ModelPlan plan = plan_of({7, 33});
  for (const Update update : {Update::sgd, Update::sgd_momentum, Update::adamw}) {
    const int moments = moments_of(update);
    const MemoryTable table =
        predict_memory(plan, {.shards = 2, .replicas = 3, .reduce_bytes = 2, .updates = {.update = update}});
    EXPECT_EQ(table.bytes(MemoryPurpose::parameters), (16 + 32) * 4);
    EXPECT_EQ(table.bytes(MemoryPurpose::moments), moments * (16 + 32) * 4);
    // The larger unit's shard of 17 elements between shards, and a third of it between replicas.
    EXPECT_EQ(table.bytes(MemoryPurpose::communication), (17 + 6) * 2);
  }
  EXPECT_EQ(predict_memory(plan, {}).bytes(MemoryPurpose::communication), 0);
}

TEST(Memory, ARoundByHand) {
  const ModelPlan plan = plan_of({7, 33});
  // Two groups of two shards: slices of 4 + 17 elements, of which a group owns at most 2 + 9 and sends 2 + 8. Two
  // messages, which come back in the same place, and the result.
  const std::int64_t numel = exchange_numel(plan, Layout::make(4, {.groups = 2}), 0);
  EXPECT_EQ(numel, 21 + 10 + 11);
  const MemoryTable two = predict_memory(plan, {.shards = 2, .evaluates_mean = true, .exchange_bytes = numel * 4});
  EXPECT_EQ(two.bytes(MemoryPurpose::exchange), numel * 4);
  EXPECT_EQ(two.bytes(MemoryPurpose::mean), two.bytes(MemoryPurpose::parameters));
  // A group alone exchanges nothing; its result is as large as the slice.
  EXPECT_EQ(exchange_numel(plan, Layout::make(2, {}), 0), 21);
  // Seven replicas of one shard: of 7 + 33 elements at most 1 + 5 are sent; all 40 are gathered.
  const auto ddp = Layout::make(14, {.groups = 2, .shard_degree = 1, .replicate_degree = 7});
  EXPECT_EQ(exchange_numel(plan, ddp, 0), 6 + 40);
  // Two groups share each elementary range, so whatever a rank holds it sends or is sent.
  const auto unequal = Layout::make(4, {.groups = std::vector<int>{1, 3}});
  EXPECT_EQ(exchange_numel(plan, unequal, 0), 40 + 40);
  EXPECT_EQ(exchange_numel(plan, unequal, 1), (3 + 11) + (3 + 11));
  EXPECT_EQ(predict_memory(plan, {.shards = 2}).bytes(MemoryPurpose::exchange), 0);
}

TEST(Memory, ARoundOfOtherSchemesAndInBucketsByHand) {
  using topology::Buckets;
  using topology::Scheme;
  const ModelPlan plan = plan_of({7, 33});
  const auto layout = Layout::make(8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2});
  const auto numel = [&](Scheme scheme, const Buckets& buckets = {}, int concurrency = 3) {
    return exchange_numel(plan, layout, 0, {.rules = {scheme, buckets, concurrency}});
  };
  // The shard of 4 + 17, and messages as large as the slices, of 2 + 9 or of the shard.
  EXPECT_EQ(numel(Scheme::split), 21 + 11);
  EXPECT_EQ(numel(Scheme::leader), 21 + 21);
  EXPECT_EQ(numel(Scheme::naive), 21 + 21);
  EXPECT_EQ(numel(Scheme::naive, {Buckets::By::unit}, 1), 21 + 17);
  EXPECT_EQ(numel(Scheme::naive, {Buckets::By::unit}, 2), 21 + 21);
  EXPECT_EQ(numel(Scheme::naive, {Buckets::By::size, 5}, 1), 21 + 5);
  // The first shard's elements 0 to 3 and 7 to 23 of the model, so 4, 3, 5, 5 and 4 in the buckets.
  EXPECT_EQ(numel(Scheme::naive, {Buckets::By::size, 5}, 3), 21 + 14);
  EXPECT_EQ(outer_numel(plan, layout, 0, usual_options(Outer::nesterov), {}, false, {Scheme::split}), 2 * 11);
  EXPECT_EQ(outer_numel(plan, layout, 0, usual_options(Outer::nesterov), {}, false, {Scheme::naive}), 2 * 21);
}

TEST(Memory, AStepARoundAndAnEvaluationTakeTurns) {
  // Of one rank a group: idle are two blocks' buffers of 40 bytes each, gathered ones and gradients.
  const ModelPlan plan = plan_of({24, 10, 10, 10, 30});
  MemoryOptions options{.shared_activation_bytes = 1000, .schedule = {.prefetch = 0}};
  const MemoryTable alone = predict_memory(plan, options);
  std::int64_t always = 0;
  for (const auto purpose : {MemoryPurpose::parameters, MemoryPurpose::gradients, MemoryPurpose::moments}) {
    always += alone.bytes(purpose);
  }
  const std::int64_t step = alone.peak - always, idle = 1000 + 40 + 2 * 40;
  const auto peak_with = [&](std::int64_t exchange, std::int64_t of_mean, bool mean, bool delayed = false) {
    options.exchange_bytes = exchange;
    options.mean_exchange_bytes = of_mean;
    options.evaluates_mean = mean;
    options.delayed = delayed;
    return predict_memory(plan, options).peak - always;
  };
  EXPECT_EQ(peak_with(step - idle, 0, false), step);
  EXPECT_EQ(peak_with(step - idle + 8, 0, false), step + 8);
  EXPECT_EQ(peak_with(8, 0, false, true), step + 8);
  const std::int64_t mean = alone.bytes(MemoryPurpose::parameters);
  EXPECT_EQ(peak_with(0, 9000, true), mean + idle + 9000);
  EXPECT_EQ(peak_with(80, 9000, true, true), mean + idle + 9000 + 80);
  // A pass gathers the head of 30 beside what is idle, one buffer of which it uses for the blocks.
  EXPECT_EQ(peak_with(0, 0, true), std::max(step, mean + idle + 30 * 4));
  options.outer_numel = 5;
  EXPECT_EQ(peak_with(9000, 0, false), idle + 9000 + 20);
  options.gpu = true;  // where the exchange and the outer state are the host's
  EXPECT_EQ(peak_with(9000, 0, false), step);
}

TEST(Memory, Llama70bOn512Ranks) {
  const ModelPlan plan = llama_plan(model::preset("llama3.1-70b"));
  MemoryOptions options{.shards = 32, .replicas = 2, .evaluates_mean = true, .compute_bytes = 2};
  const MemoryTable table = predict_memory(plan, options);
  // 70,553,706,496 elements over 32 shards; all units divide evenly.
  EXPECT_EQ(table.bytes(MemoryPurpose::parameters), 70'553'706'496 / 32 * 4);
  EXPECT_EQ(table.bytes(MemoryPurpose::moments), 70'553'706'496 / 32 * 8);
  // The head in bf16 with its gradients in fp32; beside it the last block, gathered again for its backward, and one
  // buffer more of its size; and the gradients of two blocks.
  constexpr std::int64_t kEmbedding = 128256LL * 8192, kHead = kEmbedding + 8192, kBlock = 855'654'400;
  EXPECT_EQ(table.bytes(MemoryPurpose::gathered), (kHead + 2 * kBlock) * 2);
  EXPECT_EQ(table.bytes(MemoryPurpose::gradient_buffers), (kHead + 2 * kBlock) * 4);
  // From the second micro-step on, the embedding's reduction of the one before is still under way meanwhile.
  options.schedule.micro_steps = 8;
  EXPECT_EQ(predict_memory(plan, options).bytes(MemoryPurpose::gradient_buffers),
            (kHead + kEmbedding + 2 * kBlock) * 4);
}

TEST(Memory, TheOuterOptimizersStateIsOfTheSlice) {
  const ModelPlan plan = plan_of({24, 10, 101, 30});
  const auto layout = Layout::make(12, {.groups = 2, .shard_degree = 3, .replicate_degree = 2});
  const auto numel = [&](const OuterOptions& outer, Compression::Kind kind = Compression::Kind::none) {
    return outer_numel(plan, layout, 0, outer, usual_compression(kind));
  };
  OuterOptions slow;
  slow.lr = 0.5;
  // Slices of the last replica of shard 0: of 8, 4, 34 and 10 elements the second half.
  EXPECT_EQ(numel(usual_options(Outer::fedavg)), 0);
  EXPECT_EQ(numel(slow), 4 + 2 + 17 + 5);
  EXPECT_EQ(numel(usual_options(Outer::nesterov)), 2 * (4 + 2 + 17 + 5));
  EXPECT_EQ(numel(usual_options(Outer::fedadam)), 3 * (4 + 2 + 17 + 5));
  // Anchor and residual of the slice, and of the parts that the last group owns of it.
  EXPECT_EQ(numel(usual_options(Outer::fedavg), Compression::Kind::int8), 2 * (4 + 2 + 17 + 5) + (2 + 1 + 9 + 3));
  EXPECT_EQ(predict_memory(plan, {.outer_numel = 28}).bytes(MemoryPurpose::outer), 112);
}

TEST(Memory, Bf16MastersTakeHalfAndStageOneShardInFp32) {
  const ModelPlan plan = plan_of({24, 10, 101, 30});
  MemoryOptions options{.shards = 3, .replicas = 2, .evaluates_mean = true, .exchange_bytes = 77};
  const MemoryTable fp32 = predict_memory(plan, options);
  options.master_bytes = 2;
  const MemoryTable bf16 = predict_memory(plan, options);
  for (const MemoryPurpose half : {MemoryPurpose::parameters, MemoryPurpose::mean}) {
    EXPECT_EQ(2 * bf16.bytes(half), fp32.bytes(half)) << name_of(half);
  }
  for (const MemoryPurpose same : {MemoryPurpose::gradients, MemoryPurpose::moments, MemoryPurpose::gathered}) {
    EXPECT_EQ(bf16.bytes(same), fp32.bytes(same)) << name_of(same);
  }
  EXPECT_EQ(fp32.bytes(MemoryPurpose::staging), 0);
  EXPECT_EQ(bf16.bytes(MemoryPurpose::staging), 34 * 4);
}

TEST(Memory, TheProximalAnchorIsOfWhatTrainsInTheDtypeOfMasters) {
  ModelPlan plan = plan_of({24, 10, 101, 30});
  plan.units[2].frozen = true;
  MemoryOptions options{.shards = 3};
  EXPECT_EQ(predict_memory(plan, options).bytes(MemoryPurpose::prox_anchor), 0);
  options.proximal = true;
  const MemoryTable table = predict_memory(plan, options);
  EXPECT_EQ(table.bytes(MemoryPurpose::prox_anchor), table.bytes(MemoryPurpose::gradients));
  options.master_bytes = 2;
  EXPECT_EQ(2 * predict_memory(plan, options).bytes(MemoryPurpose::prox_anchor), table.bytes(MemoryPurpose::gradients));
  options.schedule.fused_backward = true;
  EXPECT_EQ(2 * predict_memory(plan, options).bytes(MemoryPurpose::prox_anchor), table.bytes(MemoryPurpose::gradients));
}

TEST(Memory, OffloadedMomentsAreTheHosts) {
  const ModelPlan plan = plan_of({24, 10, 101, 30});
  const MemoryTable on_device = predict_memory(plan, {.shards = 3});
  const MemoryTable offloaded = predict_memory(plan, {.shards = 3, .offload = true});
  const std::int64_t moments = on_device.bytes(MemoryPurpose::moments), staged = 2 * 34 * 4;
  EXPECT_EQ(offloaded.peak, on_device.peak - moments);
  EXPECT_EQ(offloaded.host_total(), moments + staged);
  EXPECT_EQ(on_device.host_total(), 0);
  EXPECT_NE(describe(offloaded).find("(host)\n"), std::string::npos);
  EXPECT_EQ(describe(on_device).find("host"), std::string::npos);
}

TEST(Memory, TableIsAligned) {
  const MemoryTable table{
      {{MemoryPurpose::parameters, 3LL << 30}, {MemoryPurpose::gradient_buffers, 512}}, 0, 1LL << 31};
  EXPECT_EQ(describe(table),
            "parameters            3.00 GiB\n"
            "gradients under way      512 B\n"
            "at once, at most      2.00 GiB\n");
}

TEST(Memory, NamesAreKeys) {
  std::string names;
  for (const MemoryRow& row : predict_memory(plan_of({1, 1}), {}).rows)
    names += std::string(name_of(row.purpose)) + " ";
  EXPECT_EQ(names,
            "parameters gradients moments gathered gradient_buffers activations communication update staging exchange "
            "outer prox_anchor mean ");
}

TEST(Memory, RefusesImpossibleOptions) {
  EXPECT_THROW(predict_memory(plan_of({1, 1}), {.shards = 0}), base::RunError);
  EXPECT_THROW(MemoryTable{}.bytes(MemoryPurpose::mean), base::RunError);
}

}  // namespace
}  // namespace fedshard::plan
