#include "fedshard/comm/ring.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "fedshard/base/error.h"
#include "fedshard/comm/axes.h"
#include "fedshard/comm/loopback.h"

namespace fedshard::comm {
namespace {

// Runs `body(communicator)` on n threads that share one communicator; returns the bytes sent by all.
template <class Body>
Traffic on_ring(int n, Body body) {
  LoopbackWorld world(std::chrono::seconds(20));
  Members members{"test axis", {}, 0};
  for (int rank = 0; rank < n; ++rank) members.ranks.push_back(rank);
  TrafficCounter counter(std::vector<int>(n, 0));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      Members mine = members;
      mine.index = rank;
      auto transport = world.backend(rank)->connect(mine);
      body(*make_ring_communicator(mine, std::move(transport), counter));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return counter.read();
}

at::Tensor ramp(std::int64_t count, double start, at::ScalarType dtype = at::kFloat) {
  return at::arange(count, at::kDouble).add(start).to(dtype);
}

class Ring : public testing::TestWithParam<int> {};

TEST_P(Ring, AllGatherPutsEveryChunkInItsPlace) {
  const int n = GetParam();
  const Traffic traffic = on_ring(n, [&](Communicator& ring) {
    const at::Tensor buffer = at::full({n * 3}, -1.0f);
    buffer.narrow(0, ring.index() * 3, 3).copy_(ramp(3, 3.0 * ring.index()));
    ring.all_gather(buffer, Purpose::gather)->wait();
    EXPECT_TRUE(at::equal(buffer, ramp(n * 3, 0)));
  });
  EXPECT_EQ(traffic.of(Purpose::gather), n * (n - 1) * 3 * 4);
}

TEST_P(Ring, AllGatherTakesUnequalAndEmptyChunks) {
  const int n = GetParam();
  std::vector<std::int64_t> counts;
  std::int64_t total = 0;
  for (int i = 0; i < n; ++i) counts.push_back(i % 3 == 1 ? 0 : i + 1), total += counts.back();
  const Traffic traffic = on_ring(n, [&](Communicator& ring) {
    const at::Tensor buffer = at::full({total}, -1.0f);
    std::int64_t offset = 0;
    for (int i = 0; i < ring.index(); ++i) offset += counts[i];
    buffer.narrow(0, offset, counts[ring.index()]).copy_(ramp(counts[ring.index()], static_cast<double>(offset)));
    ring.all_gather(buffer, counts, Purpose::aggregate)->wait();
    EXPECT_TRUE(at::equal(buffer, ramp(total, 0)));
  });
  EXPECT_EQ(traffic.of(Purpose::aggregate), (n - 1) * total * 4);
}

TEST_P(Ring, ReduceScatterLeavesTheSumInTheOwnChunk) {
  const int n = GetParam();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const Traffic traffic = on_ring(n, [&](Communicator& ring) {
      const at::Tensor buffer = ramp(n * 2, ring.index(), dtype);
      ring.reduce_scatter(buffer, Purpose::reduce)->wait();
      const at::Tensor expected = ramp(n * 2, 0).mul(n).add(n * (n - 1) / 2.0).to(dtype);
      EXPECT_TRUE(at::equal(buffer.narrow(0, ring.index() * 2, 2), expected.narrow(0, ring.index() * 2, 2)));
    });
    EXPECT_EQ(traffic.of(Purpose::reduce), n * (n - 1) * 2 * static_cast<int>(c10::elementSize(dtype)));
  }
}

TEST_P(Ring, AllReduceGivesTheSameBitsEverywhereForAnyLength) {
  const int n = GetParam();
  for (const std::int64_t length : {0, 1, 2, 7, 64}) {
    std::vector<at::Tensor> results(n);
    const Traffic traffic = on_ring(n, [&](Communicator& ring) {
      const at::Tensor buffer = at::empty({length}, at::kFloat);
      std::mt19937 random(17 + ring.index());
      for (std::int64_t i = 0; i < length; ++i) buffer.data_ptr<float>()[i] = std::normal_distribution<float>()(random);
      results[ring.index()] = buffer;
      const at::Tensor mine = buffer.clone();
      ring.all_reduce(buffer, Purpose::replica)->wait();
      EXPECT_TRUE(n > 1 || at::equal(mine, buffer));
    });
    for (int rank = 1; rank < n; ++rank) EXPECT_TRUE(at::equal(results[rank], results[0]));
    EXPECT_EQ(traffic.of(Purpose::replica), 2 * (n - 1) * length * 4);
  }
}

TEST_P(Ring, ExchangeDeliversOneParcelAPeer) {
  const int n = GetParam();
  on_ring(n, [&](Communicator& ring) {
    std::vector<Parcel> sends, receives;
    for (int peer = 0; peer < n; ++peer) {
      if (peer == ring.index()) continue;
      sends.push_back({peer, ramp(peer + 1, 100.0 * ring.index() + peer)});
      receives.push_back({peer, at::empty({ring.index() + 1}, at::kFloat)});
    }
    ring.exchange(sends, receives, Purpose::aggregate)->wait();
    for (const Parcel& parcel : receives) {
      EXPECT_TRUE(at::equal(parcel.buffer, ramp(ring.index() + 1, 100.0 * parcel.peer + ring.index())));
    }
  });
}

TEST_P(Ring, SumsNumbersInMemberOrder) {
  const int n = GetParam();
  on_ring(n, [&](Communicator& ring) {
    std::vector<double> values{1.0, 0.1 * ring.index()};
    ring.sum(values);
    EXPECT_EQ(values[0], n);
    double expected = 0;
    for (int i = 0; i < n; ++i) expected += 0.1 * i;
    EXPECT_EQ(values[1], expected);
  });
}

TEST_P(Ring, OperationsRunInOrderAndAfterWhatTheyWaitFor) {
  const int n = GetParam();
  on_ring(n, [&](Communicator& ring) {
    const at::Tensor buffer = at::ones({n}, at::kFloat);
    const WorkPtr first = ring.reduce_scatter(buffer, Purpose::reduce);
    const WorkPtr second = ring.all_gather(buffer, Purpose::gather, first);
    second->wait();
    EXPECT_TRUE(at::equal(buffer, at::full({n}, static_cast<float>(n))));
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, Ring, testing::Values(1, 2, 3, 4, 5, 7));

TEST(RingOfOne, PassesOnWhatItWaitsForWithoutWaiting) {
  class NeverDone final : public Work {
    void wait() override { FAIL() << "an axis of one member blocked its caller"; }
  };
  TrafficCounter counter({0});
  const auto ring = make_ring_communicator({"axis of one", {0}, 0}, nullptr, counter);
  const auto before = std::make_shared<NeverDone>();
  EXPECT_EQ(ring->all_reduce(at::ones({2}, at::kFloat), Purpose::replica, before), before);
  ring->all_reduce(at::ones({2}, at::kFloat), Purpose::replica)->wait();
}

TEST(RingFailure, NamesTheOperationTheAxisAndThePeer) {
  LoopbackWorld world(std::chrono::milliseconds(50));
  TrafficCounter counter({0, 0});
  const Members members{"shard axis of group 0, replica 0", {0, 1}, 1};
  const auto ring = make_ring_communicator(members, world.backend(1)->connect(members), counter);
  const at::Tensor buffer = at::ones({2}, at::kFloat);
  const WorkPtr work = ring->all_gather(buffer, Purpose::gather);
  const WorkPtr behind = ring->all_gather(buffer, Purpose::gather);
  try {
    work->wait();
    FAIL() << "nobody answered, yet the collective ended";
  } catch (const base::PeersLostError& e) {
    EXPECT_STREQ(
        e.what(),
        "rank 1: all-gather 1 (gather) on the shard axis of group 0, replica 0 failed while waiting for rank 0: "
        "no message within 50 ms");
  }
  EXPECT_THROW(behind->wait(), base::PeersLostError);
}

TEST(Axes, CountsInsideAndBetweenGroups) {
  const auto layout = topology::Layout::make(8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2});
  LoopbackWorld world;
  TrafficCounter counter(groups_by_rank(layout));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 8; ++rank) {
    threads.emplace_back([&, rank] {
      const auto backend = world.backend(rank);
      const Axes axes = make_axes(layout, rank, *backend, counter);
      EXPECT_EQ(axes.shard->size(), 2);
      EXPECT_EQ(axes.replica->size(), 2);
      EXPECT_EQ(axes.group->size(), 4);
      EXPECT_EQ(axes.federation->size(), 2);
      const at::Tensor buffer = at::ones({8}, at::kFloat);
      axes.shard->reduce_scatter(buffer, Purpose::reduce)->wait();
      axes.replica->all_reduce(buffer, Purpose::replica)->wait();
      axes.federation->all_reduce(buffer, Purpose::aggregate)->wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Traffic traffic = counter.read();
  EXPECT_EQ(traffic.of(Purpose::reduce), 8 * 16);
  EXPECT_EQ(traffic.of(Purpose::replica), 4 * 2 * 32);
  EXPECT_EQ(traffic.inter_group, 4 * 2 * 32);
  EXPECT_EQ(traffic.intra_group, 8 * 16 + 4 * 2 * 32);
}

}  // namespace
}  // namespace fedshard::comm
