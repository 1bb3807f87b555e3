#include "fedshard/cost/flows.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "fedshard/base/error.h"
#include "fedshard/plan/group_local.h"

namespace fedshard::cost {
namespace {

using topology::Layout;

plan::ModelPlan plan_of(const std::vector<std::int64_t>& unit_numel) {
  plan::ModelPlan plan;
  for (const std::int64_t numel : unit_numel) {
    const int u = static_cast<int>(plan.units.size());
    plan.units.push_back({fmt::format("unit {}", u), {{fmt::format("p{}", u), {numel}, {}}}});
    plan.stages.push_back({fmt::format("stage {}", u), {u}, u > 0});
  }
  return plan;
}

// Sums of flows: all ranks', by use; and each rank's.
struct Sums {
  std::array<std::int64_t, kUses> bytes{}, messages{};
  std::vector<std::int64_t> sent, sent_messages;
  std::int64_t between_groups = 0;
  std::int64_t of(Use use) const { return bytes[static_cast<std::size_t>(use)]; }
};

FlowSink into(Sums& sums, const Layout& layout) {
  sums.sent.assign(static_cast<std::size_t>(layout.world()), 0);
  sums.sent_messages = sums.sent;
  return [&sums, &layout](const Flow& flow) {
    EXPECT_GT(flow.bytes, 0);
    EXPECT_GT(flow.messages, 0);
    EXPECT_NE(flow.from, flow.to);
    sums.bytes[static_cast<std::size_t>(flow.use)] += flow.bytes;
    sums.messages[static_cast<std::size_t>(flow.use)] += flow.messages;
    sums.sent[static_cast<std::size_t>(flow.from)] += flow.bytes;
    sums.sent_messages[static_cast<std::size_t>(flow.from)] += flow.messages;
    if (layout.group_of(flow.from) != layout.group_of(flow.to)) sums.between_groups += flow.bytes;
  };
}

Sums step_of(const plan::ModelPlan& plan, const Layout& layout, const TrafficOptions& options,
             Algorithm algorithm = Algorithm::ring) {
  Sums sums;
  step_flows(plan, layout, options, uses_of(plan, options), algorithm, into(sums, layout));
  return sums;
}

Sums round_of(const plan::ModelPlan& plan, const Layout& layout, const TrafficOptions& options) {
  Sums sums;
  round_flows(plan, layout, options, into(sums, layout));
  return sums;
}

const TrafficOptions kBf16{{1, true, 1}, 2, 2, 2};

// Of cost_cases.json, where the first unit alone is gathered once.
UnitUses root_kept() { return {{1, 2, 2}, {1, 1, 1}, {0, 0, 0}}; }

Sums case_of(const Layout& layout, const UnitUses& uses) {
  Sums sums;
  step_flows(plan_of({960, 480, 480}), layout, kBf16, uses, Algorithm::ring, into(sums, layout));
  return sums;
}

TEST(Flows, OfTheOracleCases) {
  const Layout eight = Layout::make(8, {});
  const Sums fsdp = case_of(eight, root_kept());  // fsdp_8
  EXPECT_EQ(fsdp.sent, std::vector<std::int64_t>(8, 8400));
  EXPECT_EQ(fsdp.sent_messages, std::vector<std::int64_t>(8, 56));
  EXPECT_EQ(collectives_of(root_kept(), eight.group(0)), 8);
  const UnitUses every{{2, 2, 2}, {1, 1, 1}, {0, 0, 0}}, once{{1, 1, 1}, {1, 1, 1}, {0, 0, 0}};
  EXPECT_EQ(case_of(eight, every).sent[3], 10080);  // fsdp_8_noroot
  EXPECT_EQ(case_of(eight, every).sent_messages[3], 63);
  EXPECT_EQ(case_of(eight, once).sent[7], 6720);  // fsdp_8_zero2
  const Layout ddp = Layout::make(8, {.shard_degree = 1, .replicate_degree = 8});
  EXPECT_EQ(case_of(ddp, once).sent, std::vector<std::int64_t>(8, 6720));  // ddp_8
  EXPECT_EQ(case_of(ddp, once).sent_messages[0], 42);
  EXPECT_EQ(collectives_of(once, ddp.group(0)), 3);
  const Layout hsdp = Layout::make(16, {.shard_degree = 4, .replicate_degree = 4});
  EXPECT_EQ(case_of(hsdp, root_kept()).sent, std::vector<std::int64_t>(16, 8640));  // hsdp_16_4
  EXPECT_EQ(case_of(hsdp, root_kept()).sent_messages[5], 42);
  EXPECT_EQ(collectives_of(root_kept(), hsdp.group(0)), 11);
}

TEST(Flows, OfTheOracleCasesRounds) {
  const plan::ModelPlan plan = plan_of({960, 480, 480});
  const Sums fsdp = round_of(plan, Layout::make(16, {.groups = 4}), kBf16);  // flfsdp_16_4
  EXPECT_EQ(fsdp.sent, std::vector<std::int64_t>(16, 1440));
  EXPECT_EQ(fsdp.between_groups, 23040);
  const Layout layout = Layout::make(32, {.groups = 2, .shard_degree = 4, .replicate_degree = 4});
  const Sums split = round_of(plan, layout, kBf16);  // flhsdp_32_split
  EXPECT_EQ(split.sent, std::vector<std::int64_t>(32, 960));
  EXPECT_EQ(split.between_groups, 7680);
  TrafficOptions naive = kBf16;
  naive.exchange.scheme = topology::Scheme::naive;
  EXPECT_EQ(round_of(plan, layout, naive).sent, std::vector<std::int64_t>(32, 960));  // flhsdp_32_naive
  EXPECT_EQ(round_of(plan, layout, naive).between_groups, 30720);
  // asym_4_6: a rank of the smaller group has most.
  const Layout asymmetric = Layout::make(10, {.groups = std::vector<int>{4, 6}});
  const Sums unequal = round_of(plan_of({1200}), asymmetric, kBf16);
  EXPECT_EQ(unequal.of(Use::aggregate), 4800);
  EXPECT_EQ(*std::max_element(unequal.sent.begin(), unequal.sent.end()), 600);
}

Layout random_layout(std::mt19937& random) {
  const int groups = 1 + static_cast<int>(random() % 4);
  std::vector<int> sizes, shards;
  int world = 0;
  const bool equal = random() % 2 == 0;
  for (int g = 0; g < groups; ++g) {
    const bool first = g == 0 || !equal;
    shards.push_back(first ? 1 + static_cast<int>(random() % 5) : shards[0]);
    sizes.push_back(first ? shards[static_cast<std::size_t>(g)] * (1 + static_cast<int>(random() % 3)) : sizes[0]);
    world += sizes.back();
  }
  return Layout::make(world, {.groups = sizes, .shard_degree = shards, .replicate_degree = topology::rest_of_group});
}

// The closed forms against every message, in layouts of all kinds.
TEST(Flows, AddUpToTheClosedForms) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 300; ++trial) {
    const Layout layout = random_layout(random);
    std::vector<std::int64_t> numel;
    for (std::size_t u = 0; u < 2 + random() % 4; ++u) numel.push_back(1 + static_cast<std::int64_t>(random() % 200));
    const plan::ModelPlan plan = plan_of(numel);
    TrafficOptions options{{1 + static_cast<int>(random() % 3), random() % 2 == 0, 1}, 2, 4, 4};
    options.schedule.reduce_each_micro_step = random() % 2 == 0;
    options.average_moments = random() % 3 == 0;
    options.exchange.buckets = {topology::Buckets::By::size, 1 + static_cast<std::int64_t>(random() % 300)};
    const bool naive_fits = layout.equal_groups();
    options.exchange.scheme = static_cast<topology::Scheme>(random() % (naive_fits ? 3 : 2));
    if (random() % 3 == 0) options.compression = plan::usual_compression(plan::Compression::Kind::int8);
    SCOPED_TRACE(fmt::format("trial {}: {}", trial, layout.describe()));
    const Sums step = step_of(plan, layout, options);
    const Bytes foretold = step_bytes(plan, layout, options);
    EXPECT_EQ(step.of(Use::gather), foretold.gather);
    EXPECT_EQ(step.of(Use::reduce), foretold.reduce);
    EXPECT_EQ(step.of(Use::replica), foretold.replica);
    EXPECT_EQ(step.between_groups, 0);
    const Sums round = round_of(plan, layout, options);
    const Bytes at_round = round_bytes(plan, layout, options);
    EXPECT_EQ(round.between_groups, at_round.aggregate_between);
    EXPECT_EQ(round.of(Use::aggregate), at_round.aggregate_between + at_round.aggregate_inside);
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

TEST(Flows, RecursiveCollectivesSendAsManyBytesInFewerMessages) {
  const plan::ModelPlan plan = plan_of({960, 481, 480});
  for (const Layout& layout : {Layout::make(16, {}), Layout::make(16, {.shard_degree = 2, .replicate_degree = 8}),
                               Layout::make(8, {.shard_degree = 1, .replicate_degree = 8})}) {
    const Sums ring = step_of(plan, layout, kBf16), recursive = step_of(plan, layout, kBf16, Algorithm::recursive);
    EXPECT_EQ(recursive.bytes, ring.bytes);
    EXPECT_LE(recursive.messages[0], ring.messages[0]);
  }
  // rd_ag_16: four messages where the ring has fifteen.
  const Layout sixteen = Layout::make(16, {});
  EXPECT_EQ(step_of(plan, sixteen, kBf16, Algorithm::recursive).messages[0] * 15,
            step_of(plan, sixteen, kBf16).messages[0] * 4);
  EXPECT_THROW(step_of(plan, Layout::make(6, {}), kBf16, Algorithm::recursive), base::UsageError);
}

TEST(Flows, LeaveOutWhatIsLocalToAGroup) {
  const plan::ModelPlan whole = plan_of({96, 48, 48});
  const plan::ModelPlan part = plan::keep_in_groups(whole, {{}, {"p1"}});
  const Layout layout = Layout::make(8, {.groups = std::vector<int>{2, 6}});
  EXPECT_EQ(round_of(part, layout, kBf16).between_groups, 2 * (96 + 48) * 2);
  EXPECT_EQ(round_of(whole, Layout::make(4, {}), kBf16).of(Use::aggregate), 0);
}

}  // namespace
}  // namespace fedshard::cost
