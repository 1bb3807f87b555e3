#include "fedshard/cost/tally.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "fedshard/model/dims.h"
#include "fedshard/plan/llama_units.h"

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

std::vector<int> groups_of(const Layout& layout) {
  std::vector<int> groups;
  for (int rank = 0; rank < layout.world(); ++rank) groups.push_back(layout.group_of(rank));
  return groups;
}

// Of so many consecutive ranks.
std::vector<int> groups_of(int world, int size) {
  std::vector<int> groups;
  for (int rank = 0; rank < world; ++rank) groups.push_back(rank / size);
  return groups;
}

const TrafficOptions kBf16{{1, true, 1}, 2, 2, 2};
const UnitUses kRootKept{{1, 2, 2}, {1, 1, 1}, {0, 0, 0}};

Tally step_of(const Layout& layout, const UnitUses& uses, Placement placement, std::vector<int> groups,
              const std::vector<std::int64_t>& units = {960, 480, 480}) {
  Tally tally(placement, std::move(groups));
  step_flows(plan_of(units), layout, kBf16, uses, Algorithm::ring, tally.sink());
  return tally;
}

// What cost_cases.json calls step_cross of flat layouts.
TEST(Tally, WhatCrossesGroupsInAFlatRing) {
  EXPECT_EQ(step_of(Layout::make(8, {}), kRootKept, {}, groups_of(8, 4)).between_groups(), 16800);    // fsdp_8
  EXPECT_EQ(step_of(Layout::make(16, {}), kRootKept, {}, groups_of(16, 4)).between_groups(), 36000);  // ratio_16
  const Layout hsdp = Layout::make(16, {.shard_degree = 4, .replicate_degree = 4});
  EXPECT_EQ(step_of(hsdp, kRootKept, {}, groups_of(16, 8)).between_groups(), 11520);  // hsdp_16_4
}

// tiers_ag_16: one all-gather of 50 bf16 elements a shard, of 16 ranks on 4 nodes in 2 cells.
TEST(Tally, TiersOfAnAllGather) {
  const Tally tally = step_of(Layout::make(16, {}), {{1}, {0}, {0}}, {.ranks_per_node = 4, .nodes_per_cell = 2},
                              groups_of(16, 4), {800});
  EXPECT_EQ(tally.total(Tier::node).bytes, 18000);
  EXPECT_EQ(tally.total(Tier::cell).bytes, 3000);
  EXPECT_EQ(tally.total(Tier::between_cells).bytes, 3000);
  EXPECT_EQ(tally.most_out_of_a_node(), 1500);
  EXPECT_EQ(tally.most_between_two_cells(), 3000);
  EXPECT_EQ(tally.total().bytes, 24000);
  EXPECT_EQ(tally.most_of_a_rank({Use::gather}), 1500);
  EXPECT_EQ(tally.most_messages_of_a_rank(), 15);
  const Tally together = step_of(Layout::make(16, {}), {{1}, {0}, {0}}, {}, groups_of(16, 16), {800});
  EXPECT_EQ(together.total(Tier::node).bytes, 24000);
  EXPECT_EQ(together.most_out_of_a_node(), 0);
}

TEST(Tally, Llama8bOn512Ranks) {
  const plan::ModelPlan plan = plan::llama_plan(model::preset("llama3.1-8b"));
  const UnitUses uses = uses_of(plan, kBf16);
  const auto step = [&](const Layout& layout) {
    Tally tally({}, groups_of(layout));
    step_flows(plan, layout, kBf16, uses, Algorithm::ring, tally.sink());
    return tally;
  };
  const Layout fsdp = Layout::make(512, {});  // llama8b_fsdp_512
  EXPECT_EQ(step(fsdp).most_of_a_rank(), 45'990'212'576);
  EXPECT_EQ(step(fsdp).most_messages_of_a_rank(), 51'100);
  EXPECT_EQ(collectives_of(uses, fsdp.group(0)), 100);
  const Layout hsdp = Layout::make(512, {.shard_degree = 4, .replicate_degree = 128});  // llama8b_hsdp_512_4
  EXPECT_EQ(step(hsdp).most_of_a_rank({Use::gather, Use::reduce}), 34'560'159'744);
  EXPECT_EQ(step(hsdp).most_of_a_rank({Use::replica}), 7'967'524'832);
  EXPECT_EQ(collectives_of(uses, hsdp.group(0)), 134);
  const Layout federated = Layout::make(512, {.groups = 128});  // llama8b_flfsdp_512_4_8
  EXPECT_EQ(step(federated).most_of_a_rank(), 34'560'159'744);
  Tally round({}, groups_of(federated));
  round_flows(plan, federated, kBf16, round.sink());
  EXPECT_EQ(round.most_of_a_rank(), 7'967'524'832);
  EXPECT_EQ(round.most_messages_of_a_rank(), 254);
  EXPECT_EQ(round.most_of_a_rank() / 8, 995'940'604);
}

}  // namespace
}  // namespace fedshard::cost
