#include "fedshard/cost/formulas.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "fedshard/model/dims.h"
#include "fedshard/plan/freeze.h"
#include "fedshard/plan/group_local.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::cost {
namespace {

using topology::Layout;

plan::ModelPlan three_units() {
  plan::ModelPlan plan;
  for (const std::int64_t numel : {960, 480, 480}) {
    const int u = static_cast<int>(plan.units.size());
    plan.units.push_back({fmt::format("unit {}", u), {{fmt::format("p{}", u), {numel}, {}}}});
    plan.stages.push_back({fmt::format("stage {}", u), {u}, u > 0});
  }
  return plan;
}

// The cases of cost.md whose units are 960/480/480 in bf16 keep only the first unit gathered; ours also the last, so
// the middle one alone is gathered twice.
TEST(Formulas, AStepOfFsdpHsdpAndDdp) {
  const TrafficOptions bf16{{1, true, 1}, 2, 2, 2};
  const plan::ModelPlan plan = three_units();
  const Bytes fsdp = step_bytes(plan, Layout::make(8, {}), bf16);
  EXPECT_EQ(fsdp.gather, 7 * (960 + 2 * 480 + 480) * 2);
  EXPECT_EQ(fsdp.reduce, 7 * 1920 * 2);
  const Bytes kept = step_bytes(plan, Layout::make(8, {}), {{1, false, 1}, 2, 2, 2});
  EXPECT_EQ(kept.gather + kept.reduce, 8 * 6720);  // fsdp_8_zero2
  const Bytes ddp = step_bytes(plan, Layout::make(8, {.shard_degree = 1, .replicate_degree = 8}), bf16);
  EXPECT_EQ(ddp.gather + ddp.reduce, 0);
  EXPECT_EQ(ddp.replica, 8 * 6720);  // ddp_8
  const Bytes hsdp = step_bytes(plan, Layout::make(16, {.shard_degree = 4, .replicate_degree = 4}), bf16);
  EXPECT_EQ(hsdp.replica, 16 * 1440);  // hsdp_16_4
}

// Every block of every replica is gathered once more, in fp32, however many micro-steps there are.
TEST(Formulas, MuonGathersBlocksOnceMore) {
  const plan::ModelPlan plan = plan::llama_plan(model::preset("llama-tiny"));
  const Layout layout = Layout::make(24, {.groups = 2, .shard_degree = 3, .replicate_degree = 4});
  std::int64_t shards_of_blocks = 0;
  for (std::size_t u = 1; u + 1 < plan.units.size(); ++u) shards_of_blocks += (plan.units[u].numel() + 2) / 3;
  for (const int micro_steps : {1, 5}) {
    TrafficOptions options{{micro_steps, true, 1}, 2, 2, 2};
    const Bytes adamw = step_bytes(plan, layout, options);
    options.updates.update = plan::Update::muon;
    const Bytes muon = step_bytes(plan, layout, options);
    EXPECT_EQ(muon.gather - adamw.gather, 24 * 2 * shards_of_blocks * 4);
    EXPECT_EQ(muon.reduce, adamw.reduce);
    EXPECT_EQ(muon.replica, adamw.replica);
  }
}

TEST(Formulas, ARoundBetweenAndInsideGroups) {
  const TrafficOptions options{{1, true, 1}, 2, 2, 2};
  const plan::ModelPlan plan = three_units();
  const Bytes flat = round_bytes(plan, Layout::make(16, {.groups = 4}), options);
  EXPECT_EQ(flat.aggregate_between, 23040);  // flfsdp_16_4
  EXPECT_EQ(flat.aggregate_inside, 0);
  const Bytes split =
      round_bytes(plan, Layout::make(32, {.groups = 2, .shard_degree = 4, .replicate_degree = 4}), options);
  EXPECT_EQ(split.aggregate_between, 7680);  // flhsdp_32_split
  EXPECT_EQ(split.aggregate_between + split.aggregate_inside, 30720);
  EXPECT_EQ(round_bytes(plan, Layout::make(4, {}), options).inside(), 0);
}

TEST(Formulas, ARoundOfEveryScheme) {
  using topology::Scheme;
  const plan::ModelPlan plan = three_units();
  const Layout layout = Layout::make(32, {.groups = 2, .shard_degree = 4, .replicate_degree = 4});
  const auto rules = [](Scheme scheme, topology::Buckets buckets = {}) {
    TrafficOptions options{{1, true, 1}, 2, 2, 2};
    options.exchange = {scheme, buckets};
    return options;
  };
  const Bytes naive = round_bytes(plan, layout, rules(Scheme::naive));
  EXPECT_EQ(naive, (Bytes{0, 0, 0, 0, 30720}));  // flhsdp_32_naive
  EXPECT_EQ(warm_up_end_bytes(plan, layout, rules(Scheme::naive)), naive);
  EXPECT_EQ(synchronous_bytes(plan, layout, {Scheme::naive}), naive * 2);
  EXPECT_EQ(synchronous_bytes(plan, layout, {Scheme::leader}), synchronous_bytes(plan, layout));
  const Layout unequal = Layout::make(9, {std::vector<int>{6, 3}, std::vector<int>{2, 3}, -1});
  for (const Layout& some : {layout, unequal}) {
    EXPECT_EQ(round_bytes(plan, some, rules(Scheme::leader)), round_bytes(plan, some, rules(Scheme::split)));
  }
  EXPECT_EQ(round_bytes(plan, Layout::make(4, {1, 1, 4}), rules(Scheme::naive)), Bytes{});
  for (const Scheme scheme : {Scheme::split, Scheme::leader, Scheme::naive}) {
    TrafficOptions whole = rules(scheme), in_buckets = rules(scheme, {topology::Buckets::By::size, 100});
    EXPECT_EQ(round_bytes(plan, layout, whole), round_bytes(plan, layout, in_buckets));
    // Blocks end with their parts, of which there are more.
    for (TrafficOptions* options : {&whole, &in_buckets}) {
      options->compression = plan::usual_compression(plan::Compression::Kind::int8);
    }
    EXPECT_GT(round_bytes(plan, layout, in_buckets).between(), round_bytes(plan, layout, whole).between());
  }
}

TEST(Formulas, AWarmUpSumsFp32GradientsAndEndsLikeARound) {
  TrafficOptions options{{1, true, 1}, 2, 2, 2};
  const plan::ModelPlan plan = three_units();
  const Layout layout = Layout::make(7, {std::vector<int>{4, 3}, std::vector<int>{2, 3}, -1});
  EXPECT_EQ(synchronous_bytes(plan, layout), (Bytes{0, 0, 0, 1920 * 4, 2 * 1920 * 4}));
  EXPECT_EQ(warm_up_end_bytes(plan, layout, options), round_bytes(plan, layout, options));
  options.compression = plan::usual_compression(plan::Compression::Kind::int8);
  EXPECT_EQ(warm_up_end_bytes(plan, layout, options), (Bytes{0, 0, 0, 1920 * 2, 2 * 1920 * 2}));
  const plan::ModelPlan frozen = plan::freeze(plan, {"p0"});
  EXPECT_EQ(synchronous_bytes(frozen, layout).between(), 2 * 960 * 4);
  EXPECT_EQ(synchronous_bytes(plan, Layout::make(6, {1, 3, 2})), Bytes{});
  EXPECT_EQ(warm_up_end_bytes(plan, Layout::make(6, {1, 3, 2}), options), Bytes{});
}

TEST(Formulas, BytesAddUp) {
  const Bytes a{1, 2, 3, 4, 5}, b{10, 20, 30, 40, 50};
  EXPECT_EQ(a + b, (Bytes{11, 22, 33, 44, 55}));
  EXPECT_EQ(a * 3, (Bytes{3, 6, 9, 12, 15}));
}

TEST(Formulas, UnequalGroupsAddUp) {
  TrafficOptions options{{2, true, 1}, 2, 4, 4};
  options.updates.update = plan::Update::muon;
  const plan::ModelPlan plan = plan::llama_plan(model::preset("llama-tiny"));
  const Layout both = Layout::make(10, {std::vector<int>{4, 6}, std::vector<int>{4, 3}, std::vector<int>{1, 2}});
  const Layout first = Layout::make(4, {}), second = Layout::make(6, {1, 3, 2});
  const auto sum = [&](auto bytes) {
    const Bytes a = bytes(first), b = bytes(second), all = bytes(both);
    EXPECT_EQ(all.gather, a.gather + b.gather);
    EXPECT_EQ(all.reduce, a.reduce + b.reduce);
    EXPECT_EQ(all.replica, a.replica + b.replica);
  };
  sum([&](const Layout& layout) { return step_bytes(plan, layout, options); });
  sum([&](const Layout& layout) { return forward_bytes(plan, layout, options); });
  // asym_4_6 and its kin: between groups the volume is that of equal ones.
  EXPECT_EQ(round_bytes(plan, both, options).aggregate_between, 2 * plan.numel() * 4);
  EXPECT_EQ(round_bytes(plan, both, options).aggregate_inside, plan.numel() * 4);
}

// llama8b_fsdp_512 and its kin: Llama 3.1 8B in bf16, first and last unit gathered once.
TEST(Formulas, Llama8bOn512Ranks) {
  const TrafficOptions bf16{{1, true, 1}, 2, 2, 2};
  const plan::ModelPlan plan = plan::llama_plan(model::preset("llama3.1-8b"));
  const Bytes fsdp = step_bytes(plan, Layout::make(512, {}), bf16);
  EXPECT_EQ((fsdp.gather + fsdp.reduce) / 512, 45990212576);
  const Bytes hsdp = step_bytes(plan, Layout::make(512, {.shard_degree = 4, .replicate_degree = 128}), bf16);
  EXPECT_EQ((hsdp.gather + hsdp.reduce) / 512, 34560159744);
  EXPECT_EQ(hsdp.replica / 512, 7967524832);
  const Layout federated = Layout::make(512, {.groups = 128});
  EXPECT_EQ(step_bytes(plan, federated, bf16).inside() / 512, 34560159744);
  EXPECT_EQ(round_bytes(plan, federated, bf16).aggregate_between / 512, 7967524832);
}

TEST(Formulas, FrozenUnitsAreGatheredAndNothingElse) {
  const TrafficOptions options{{4, true, 1}, 2, 4, 4};
  const plan::ModelPlan plan = plan::freeze(three_units(), {"p1"});
  const Layout layout = Layout::make(16, {.groups = 2, .shard_degree = 4, .replicate_degree = 2});
  const Bytes step = step_bytes(plan, layout, options);
  EXPECT_EQ(step.gather, 4 * 16 * 3 * (240 + 2 * 120 + 120) * 2);
  EXPECT_EQ(step.reduce, 4 * 16 * 3 * (240 + 120) * 4);
  EXPECT_EQ(step.replica, 4 * 2 * 8 * (240 + 120) * 4);
  EXPECT_EQ(round_bytes(plan, layout, options).between(), 2 * (960 + 480) * 4);
  TrafficOptions last = options;
  last.schedule.reduce_each_micro_step = false;
  EXPECT_EQ(step_bytes(plan, layout, last).gather, step.gather);
  EXPECT_EQ(step_bytes(plan, layout, last).reduce, step.reduce / 4);
  EXPECT_EQ(step_bytes(plan, layout, last).replica, step.replica / 4);
}

TEST(Formulas, GroupLocalUnitsHaveStepsButNoRounds) {
  TrafficOptions options{{1, true, 1}, 2, 4, 4};
  const plan::ModelPlan plan = plan::keep_in_groups(three_units(), {{}, {"p0"}});  // half the model
  for (const Layout& layout : {Layout::make(16, {.groups = 2, .shard_degree = 4, .replicate_degree = 2}),
                               Layout::make(4, {std::vector<int>{1, 3}})}) {
    const Bytes step = step_bytes(plan, layout, options), whole = step_bytes(three_units(), layout, options);
    EXPECT_EQ(step.gather, whole.gather);
    EXPECT_EQ(step.reduce, whole.reduce);
    EXPECT_EQ(step.replica, whole.replica);
    for (const auto kind : {plan::Compression::Kind::none, plan::Compression::Kind::bf16}) {
      options.compression = plan::usual_compression(kind);
      const Bytes round = round_bytes(plan, layout, options), all = round_bytes(three_units(), layout, options);
      EXPECT_EQ(2 * round.aggregate_between, all.aggregate_between);
      EXPECT_EQ(2 * round.aggregate_inside, all.aggregate_inside);
      EXPECT_GT(round.aggregate_between, 0);
    }
  }
}

// The closed form of the gathers is the schedule's count, for tied and untied models.
TEST(Formulas, GathersAreTheSchedules) {
  for (const bool tied : {false, true}) {
    model::Dims dims = model::preset("llama-tiny");
    dims.tie_word_embeddings = tied;
    const plan::ModelPlan whole = plan::llama_plan(dims);
    for (const auto& frozen : {std::vector<std::string>{}, {"*norm*"}, {"model.embed*", "model.layers.0.*"}}) {
      const plan::ModelPlan plan = plan::freeze(whole, frozen);
      for (const bool reshard : {false, true}) {
        const plan::Schedule schedule = plan::step_schedule(plan, {1, reshard, 1, /*recompute=*/tied});
        for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
          const auto gathers = std::count_if(schedule.begin(), schedule.end(), [&](const plan::Op& op) {
            return op.kind == plan::OpKind::gather && op.unit == u;
          });
          EXPECT_EQ(gathers_of(plan, u, reshard), gathers) << plan.units[u].name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fedshard::cost
