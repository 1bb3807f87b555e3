// What is counted for a backend that moves its bytes itself must be what our rings send, member by member.
#include "fedshard/comm/chunks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <thread>

#include "fedshard/comm/loopback.h"
#include "fedshard/comm/ring.h"

namespace fedshard::comm {
namespace {

// Bytes that each of n members sends while all run `body`.
std::vector<std::int64_t> sent_by_member(int n, const std::function<void(Communicator&)>& body) {
  LoopbackWorld world(std::chrono::seconds(20));
  Members members{"test axis", {}, 0};
  for (int rank = 0; rank < n; ++rank) members.ranks.push_back(rank);
  std::vector<std::int64_t> sent(n);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      TrafficCounter counter(std::vector<int>(n, 0));
      Members mine = members;
      mine.index = rank;
      body(*make_ring_communicator(mine, world.backend(rank)->connect(mine), counter));
      sent[rank] = counter.read().intra_group;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return sent;
}

using Sent = std::int64_t (*)(std::span<const std::int64_t>, int);

std::vector<std::int64_t> expected(const std::vector<std::int64_t>& offsets, std::vector<Sent> parts) {
  std::vector<std::int64_t> bytes;
  for (int member = 0; member + 1 < static_cast<int>(offsets.size()); ++member) {
    bytes.push_back(0);
    for (const Sent part : parts) bytes.back() += 4 * part(offsets, member);
  }
  return bytes;
}

class RingBytes : public testing::TestWithParam<int> {};

TEST_P(RingBytes, OfAnyLengthReduced) {
  const int n = GetParam();
  for (const std::int64_t numel : {0, 1, 2, 7, 64, 101}) {
    const auto sent =
        sent_by_member(n, [&](Communicator& ring) { ring.all_reduce(at::ones({numel}), Purpose::replica)->wait(); });
    EXPECT_EQ(sent, expected(even_offsets(numel, n), {sent_by_reduce, sent_by_gather})) << numel << " elements";
  }
}

TEST_P(RingBytes, OfEqualChunks) {
  const int n = GetParam();
  const auto gathered =
      sent_by_member(n, [&](Communicator& ring) { ring.all_gather(at::ones({5 * n}), Purpose::gather)->wait(); });
  EXPECT_EQ(gathered, expected(even_offsets(5 * n, n), {sent_by_gather}));
  const auto reduced =
      sent_by_member(n, [&](Communicator& ring) { ring.reduce_scatter(at::ones({5 * n}), Purpose::reduce)->wait(); });
  EXPECT_EQ(reduced, expected(even_offsets(5 * n, n), {sent_by_reduce}));
}

TEST_P(RingBytes, OfUnequalAndEmptyChunks) {
  const int n = GetParam();
  std::vector<std::int64_t> counts, offsets{0};
  for (int i = 0; i < n; ++i) counts.push_back(i % 2 == 0 ? 0 : 3 * i), offsets.push_back(offsets.back() + counts[i]);
  const auto sent = sent_by_member(
      n, [&](Communicator& ring) { ring.all_gather(at::ones({offsets.back()}), counts, Purpose::gather)->wait(); });
  EXPECT_EQ(sent, expected(offsets, {sent_by_gather}));
}

INSTANTIATE_TEST_SUITE_P(Members, RingBytes, testing::Values(1, 2, 3, 5));

TEST(Chunks, CoverEverythingInOrder) {
  EXPECT_EQ(even_offsets(7, 3), (std::vector<std::int64_t>{0, 2, 4, 7}));
  EXPECT_EQ(even_offsets(1, 4), (std::vector<std::int64_t>{0, 0, 0, 0, 1}));
}

}  // namespace
}  // namespace fedshard::comm
