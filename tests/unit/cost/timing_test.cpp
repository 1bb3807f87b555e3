#include "fedshard/cost/timing.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <vector>

namespace fedshard::cost {
namespace {

std::vector<int> ranks_to(int n) {
  std::vector<int> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Machine machine_with(std::initializer_list<std::pair<Key, double>> constants) {
  Machine machine;
  machine.at(Key::network_efficiency).value = machine.at(Key::congestion_doublings).value = 1;
  machine.at(Key::cell_bandwidth).value = 1e30;
  for (const auto& [key, value] : constants) machine.at(key).value = value;
  return machine;
}

TEST(Timing, LockstepRings) {
  const std::array<Link, 1> equal = {{{5e-6, 1e10}}};
  EXPECT_NEAR(lockstep_seconds(8, 1e6, equal), 0.000735, 1e-12);
  const std::array<Link, 2> tiers = {{{3e-6, 2e11}, {1e-5, 1e10}}};
  EXPECT_NEAR(lockstep_seconds(16, 1e6, tiers), 0.00165, 1e-12);
}

TEST(Timing, LockstepRingOverTwoNodes) {
  Machine machine = machine_with({{Key::node_latency, 3e-6},
                                  {Key::node_bandwidth, 2e11},
                                  {Key::network_latency, 1e-5},
                                  {Key::network_bandwidth, 1e10}});
  machine.placement.ranks_per_node = 4;
  machine.software.lockstep = true;
  EXPECT_NEAR(ring_seconds(path_of(ranks_to(16), machine.placement), machine, 1, 1e6), 0.00165, 1e-12);
  EXPECT_NEAR(ring_seconds(path_of(ranks_to(4), machine.placement), machine, 2, 1e6), 2 * 3 * 8e-6, 1e-12);
}

TEST(Timing, AdditiveRingOfALayerOn512Ranks) {
  Machine machine = machine_with({{Key::collective_base, 8e-6},
                                  {Key::node_latency, 3e-6},
                                  {Key::network_latency, 1e-5},
                                  {Key::node_bandwidth, 2e11},
                                  {Key::network_bandwidth, 1.25e10}});
  machine.placement.ranks_per_node = 4;
  const Path path = path_of(ranks_to(512), machine.placement);
  EXPECT_EQ(path.node_hops, 384);
  EXPECT_EQ(path.network_hops, 127);
  EXPECT_EQ(path.nodes, 128);
  EXPECT_EQ(path.per_node, 4);
  EXPECT_NEAR(ring_seconds(path, machine, 1, 852000), 0.01113744, 1e-10);
}

TEST(Timing, HopsOfEachTier) {
  const Placement placement{4, 2};
  const Path path = path_of(ranks_to(16), placement);
  EXPECT_EQ(path.node_hops, 12);
  EXPECT_EQ(path.network_hops, 2);
  EXPECT_EQ(path.cell_hops, 1);
  const Path strided = path_of(std::vector<int>{0, 4, 8, 12}, placement);
  EXPECT_EQ(strided.node_hops, 0);
  EXPECT_EQ(strided.per_node, 1);
  EXPECT_EQ(path_of(std::vector<int>{0, 1, 2, 3, 4}, placement).per_node, 1);
}

TEST(Timing, CongestionGrowsWithTheNodes) {
  const Machine machine =
      machine_with({{Key::network_efficiency, 0.9}, {Key::congestion, 0.5}, {Key::congestion_doublings, 8}});
  EXPECT_DOUBLE_EQ(network_efficiency(machine, 1), 1);
  EXPECT_DOUBLE_EQ(network_efficiency(machine, 16), 0.9 * 0.75);
  EXPECT_DOUBLE_EQ(network_efficiency(machine, 256), 0.45);
  EXPECT_DOUBLE_EQ(network_efficiency(machine, 4096), 0.45);
}

TEST(Timing, RingsBesideEachOtherShareTheLinksOfCells) {
  Machine machine =
      machine_with({{Key::node_bandwidth, 1e12}, {Key::network_bandwidth, 10}, {Key::cell_bandwidth, 24}});
  machine.placement = {1, 2};
  const Path path = path_of(ranks_to(4), machine.placement);
  EXPECT_DOUBLE_EQ(bandwidth_of(path, machine, 1), 10);
  EXPECT_DOUBLE_EQ(bandwidth_of(path, machine, 3), 8);
}

TEST(Timing, LatenessOfTheLatest) {
  EXPECT_DOUBLE_EQ(harmonic(1), 1);
  EXPECT_NEAR(harmonic(4), 25.0 / 12, 1e-15);
  const Machine machine = machine_with({{Key::jitter, 0.5}, {Key::node_bandwidth, 1}});
  EXPECT_NEAR(ring_seconds(path_of(ranks_to(4), {}), machine, 1, 0), 25.0 / 24, 1e-12);
  EXPECT_DOUBLE_EQ(ring_seconds(path_of(ranks_to(1), {}), machine, 1, 100), 0);
}

}  // namespace
}  // namespace fedshard::cost
