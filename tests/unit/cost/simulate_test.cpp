#include "fedshard/cost/simulate.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>

#include "fedshard/base/error.h"
#include "fedshard/cost/timing.h"

namespace fedshard::cost {
namespace {

// A byte and a FLOP take a second, and nothing else takes any time.
Machine unit_machine() {
  Machine machine;
  for (const Key key : {Key::peak_flops, Key::efficiency, Key::memory_bandwidth, Key::node_bandwidth,
                        Key::network_bandwidth, Key::network_efficiency, Key::congestion_doublings}) {
    machine.at(key).value = 1;
  }
  machine.at(Key::cell_bandwidth).value = 1e30;
  return machine;
}

// Layers between an embedding and a head that have neither parameters nor computations.
Job layers(std::int64_t count, double forward, std::int64_t shard_numel, int prefetch,
           const topology::Layout& layout = topology::Layout::make(2, {})) {
  plan::ModelPlan plan;
  for (int u = 0; u < count + 2; ++u) {
    const bool is_layer = u > 0 && u <= count;
    plan.units.push_back({fmt::format("unit {}", u), {{fmt::format("p{}", u), {is_layer ? 2 * shard_numel : 0}, {}}}});
    plan.stages.push_back({fmt::format("stage {}", u), {u}, u > 0});
  }
  std::vector<double> flops(static_cast<std::size_t>(count) + 2, forward);
  flops.front() = flops.back() = 0;
  TrafficOptions traffic;
  traffic.bytes_gather = traffic.bytes_reduce = traffic.bytes_aggregate = 1;
  traffic.schedule.prefetch = prefetch;
  return {.plan = plan, .layout = layout, .traffic = traffic, .stage_flops = flops};
}

StepTime step_of(const Job& job, const Machine& machine = unit_machine(), std::vector<Busy>* busy = nullptr) {
  Noise mean;
  return Simulator(job, machine).step(0, mean, busy);
}

RoundTime round_of(const Job& job) {
  const Machine machine = unit_machine();
  Noise mean;
  return Simulator(job, machine).round(mean);
}

// By hand: forward gather + (L - 1) max(gather, forward) + forward; backward L (gather + backward + reduce), or with a
// gather ahead as the queues have it.
TEST(Simulate, OverlapsOfUniformLayers) {
  EXPECT_DOUBLE_EQ(step_of(layers(3, 2, 3, 0)).total, 41);
  EXPECT_DOUBLE_EQ(step_of(layers(3, 2, 3, 1)).total, 31);
  EXPECT_DOUBLE_EQ(step_of(layers(4, 5, 1, 1)).total, 63);
}

TEST(Simulate, PartsOfAStepAreTheStep) {
  for (const int prefetch : {0, 1, 2}) {
    for (const std::int64_t numel : {1, 3, 20}) {
      Machine machine = unit_machine();
      machine.at(Key::update_bytes).value = 2;
      machine.at(Key::step_overhead).value = 5;
      machine.at(Key::call_per_rank).value = 0.25;
      const StepTime time = step_of(layers(5, 4, numel, prefetch), machine);
      EXPECT_DOUBLE_EQ(time.compute, 5 * 3 * 4.0);
      EXPECT_DOUBLE_EQ(time.update, 5 * 2.0 * static_cast<double>(numel));
      EXPECT_NEAR(time.total,
                  time.compute + time.gather + time.reduce + time.replica + time.host + time.update + time.overhead,
                  1e-9);
    }
  }
}

// Each resource does one thing at a time, and a computation begins when its unit is there.
TEST(Simulate, NoResourceDoesTwoThingsAtATime) {
  std::vector<Busy> busy;
  topology::LayoutOptions options;
  options.shard_degree = 2;
  options.replicate_degree = 2;
  const Job job = layers(4, 3, 4, 1, topology::Layout::make(4, options));
  const StepTime time = step_of(job, unit_machine(), &busy);
  EXPECT_GT(time.replica, 0);
  std::array<double, 4> free{};
  for (const Busy& span : busy) {
    double& until = free[static_cast<std::size_t>(span.lane)];
    EXPECT_LE(until, span.begin) << span.what;
    EXPECT_LT(span.begin, span.end) << span.what;
    EXPECT_LE(span.end, time.total) << span.what;
    until = span.end;
  }
  EXPECT_EQ(busy.front().what, "gather unit 1");
}

TEST(Simulate, ARankAloneOnlyComputes) {
  const StepTime time = step_of(layers(3, 2, 3, 1, topology::Layout::make(1, {})));
  EXPECT_DOUBLE_EQ(time.total, 3 * 2 * 3.0);
  EXPECT_DOUBLE_EQ(time.compute, time.total);
}

TEST(Simulate, ARoundIsItsStepsAndItsExchange) {
  topology::LayoutOptions options;
  options.groups = 2;
  Job job = layers(3, 2, 3, 1, topology::Layout::make(4, options));
  job.pace = plan::Pace::of_steps(5);
  const RoundTime round = round_of(job);
  // 18 elements, of which each of two ranks exchanges its half: 2 (G-1)/G x 18 / 2 bytes.
  EXPECT_DOUBLE_EQ(round.exchange, 9);
  EXPECT_DOUBLE_EQ(round.total, 5 * 31.0 + 9);
  EXPECT_DOUBLE_EQ(round.exposed, 9);
  EXPECT_EQ(round.tokens, 5 * 4);
  EXPECT_EQ(round.counts, (std::vector<std::int64_t>{5, 5}));
  job.delay = 1;
  EXPECT_DOUBLE_EQ(round_of(job).exposed, 0);
  job.delay = 0;
  job.fragments = 3;
  EXPECT_DOUBLE_EQ(round_of(job).exchange, 9);
}

TEST(Simulate, GroupsOfUnequalSizes) {
  topology::LayoutOptions options;
  options.groups = std::vector<int>{1, 3};
  Job job = layers(2, 6, 3, 1, topology::Layout::make(4, options));
  job.pace = plan::Pace::of_steps(4);
  const RoundTime round = round_of(job);
  EXPECT_DOUBLE_EQ(round.steps[0].total, 36);  // nothing to wait for
  EXPECT_GT(round.steps[1].total, 36);
  EXPECT_DOUBLE_EQ(round.waiting, 4 * (round.steps[1].total - round.steps[0].total));
  EXPECT_DOUBLE_EQ(round.exchange, 12);  // the group of one sends its 12 elements' half and gets the other's
}

TEST(Simulate, DrawnLatenessHasTheMeanOfItsDistribution) {
  Noise drawn(3);
  Noise mean;
  for (const std::int64_t n : {1, 2, 7, 512}) {
    double sum = 0;
    constexpr int kDraws = 20000;
    for (int i = 0; i < kDraws; ++i) sum += drawn.latest_of(n);
    EXPECT_NEAR(sum / kDraws, mean.latest_of(n), 0.05) << n;
    EXPECT_DOUBLE_EQ(mean.latest_of(n), harmonic(n));
  }
}

TEST(Simulate, MuonGathersAndOrthogonalises) {
  Job job = layers(2, 1, 8, 1);
  for (const std::size_t u : {1, 2}) job.plan.units[u].parameters[0].shape = {2, 8};
  const double plain = step_of(job).total;
  job.traffic.updates.update = plan::Update::muon;
  // Of each of two layers: a gather of 8 elements of 4 bytes, and 5 (4 x 2 x 2 x 8 + 2 x 2 x 2 x 2) FLOPs.
  EXPECT_DOUBLE_EQ(step_of(job).total, plain + 2 * (8 * 4 + 5 * (4 * 2 * 16 + 2 * 8)));
}

TEST(Simulate, RefusesWhatDoesNotFitOneRoot) {
  Job job = layers(2, 1, 1, 1);
  EXPECT_EQ(with_root_unit(job.plan).units.size(), job.plan.units.size() - 1);
  EXPECT_EQ(with_root_unit(job.plan).stages.back().units, (std::vector<int>{0}));
  EXPECT_EQ(with_root_unit(with_root_unit(job.plan)).units.size(), job.plan.units.size() - 1);
  job.plan.units.back().places = {0};
  EXPECT_THROW(with_root_unit(job.plan), base::UsageError);
}

}  // namespace
}  // namespace fedshard::cost
