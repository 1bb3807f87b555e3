// The collectives over Gloo's connections, ranks as threads that each have a backend and a client of one store.
#include "fedshard/comm/gloo.h"

#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "fedshard/base/error.h"
#include "fedshard/comm/axes.h"
#include "fedshard/comm/loopback.h"
#include "fedshard/comm/ring.h"

namespace fedshard::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{60'000};  // a deadline that no test should reach
constexpr const char* kHere = "127.0.0.1";

// A socket that is bound to a port of the system's choice.
struct BoundSocket {
  BoundSocket() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                       ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    base::require(bound, "cannot bind: {}", std::strerror(errno));
    port = ::ntohs(address.sin_port);
  }
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int port = 0;
};

struct ServedStore {
  ServedStore() {
    const BoundSocket socket;
    base::require(::listen(socket.fd, 64) == 0, "cannot listen: {}", std::strerror(errno));
    port = socket.port;
    store = Store::serve(socket.fd, kHere, port, kLong);  // takes the descriptor over
  }
  int port = 0;
  std::shared_ptr<Store> store;
};

std::unique_ptr<Backend> gloo_backend(const ServedStore& served, milliseconds deadline) {
  return make_gloo_backend(Store::connect(kHere, served.port, kLong), {"", kHere, deadline});
}

Members test_axis(int n, int index) {
  Members members{"test axis", std::vector<int>(static_cast<std::size_t>(n)), index};
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  return members;
}

using RankBody = std::function<void(Communicator&)>;
using BackendOf = std::function<std::unique_ptr<Backend>(int rank)>;

// Runs `body` on n threads that share one communicator; rethrows the first exception. Returns the bytes sent by all.
Traffic on_ring(int n, const BackendOf& backend_of, const RankBody& body) {
  TrafficCounter counter(std::vector<int>(static_cast<std::size_t>(n), 0));
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto backend = backend_of(rank);
        body(*make_ring_communicator(test_axis(n, rank), backend->connect(test_axis(n, rank)), counter));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
  return counter.read();
}

at::Tensor random_buffer(std::int64_t count, int rank, at::ScalarType dtype) {
  std::mt19937 random(static_cast<unsigned>(17 + rank));
  const at::Tensor buffer = at::empty({count}, at::kFloat);
  for (std::int64_t i = 0; i < count; ++i) buffer.data_ptr<float>()[i] = std::normal_distribution<float>()(random);
  return buffer.to(dtype);
}

// Every collective once; the buffers that a rank ends with, of which a reduce-scatter's is its own chunk.
std::vector<at::Tensor> collectives(Communicator& ring, at::ScalarType dtype, std::int64_t chunk) {
  const int n = ring.size(), r = ring.index();
  std::vector<at::Tensor> results;
  const at::Tensor gathered = random_buffer(n * chunk, r, dtype);
  ring.all_gather(gathered, Purpose::gather)->wait();
  results.push_back(gathered);

  std::vector<std::int64_t> counts;
  for (int i = 0; i < n; ++i) counts.push_back(i == 1 ? 0 : chunk + i);
  const at::Tensor unequal = random_buffer(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), r, dtype);
  ring.all_gather(unequal, counts, Purpose::aggregate)->wait();
  results.push_back(unequal);

  const at::Tensor scattered = random_buffer(n * chunk, r, dtype);
  ring.reduce_scatter(scattered, Purpose::reduce)->wait();
  results.push_back(scattered.narrow(0, r * chunk, chunk));

  const at::Tensor reduced = random_buffer(n * chunk + 1, r, dtype);
  ring.all_reduce(reduced, Purpose::replica)->wait();
  results.push_back(reduced);

  std::vector<Parcel> sends, receives;
  for (int peer = 0; peer < n; ++peer) {
    if (peer == r) continue;
    sends.push_back({peer, random_buffer(chunk + peer, 10 * r + peer, dtype)});
    receives.push_back({peer, at::zeros({chunk + r}, dtype)});
  }
  ring.exchange(sends, receives, Purpose::state)->wait();
  for (const Parcel& parcel : receives) results.push_back(parcel.buffer);
  return results;
}

struct Results {
  std::vector<std::vector<at::Tensor>> by_rank;
  Traffic traffic;
};

Results run_collectives(int n, const BackendOf& backend_of, at::ScalarType dtype, std::int64_t chunk) {
  Results results{std::vector<std::vector<at::Tensor>>(static_cast<std::size_t>(n)), {}};
  results.traffic = on_ring(n, backend_of, [&](Communicator& ring) {
    results.by_rank[static_cast<std::size_t>(ring.index())] = collectives(ring, dtype, chunk);
  });
  return results;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0;
}

class Gloo : public testing::TestWithParam<int> {};

TEST_P(Gloo, CollectivesHaveTheBitsAndBytesOfLoopback) {
  const int n = GetParam();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    // The last is larger than a socket's buffers, so that both directions of a ring step must make way together.
    for (const std::int64_t chunk : {1, 7, 1'000'003}) {
      const ServedStore served;
      LoopbackWorld world(kLong);
      const Results gloo = run_collectives(
          n, [&](int) { return gloo_backend(served, kLong); }, dtype, chunk);
      const Results loopback = run_collectives(
          n, [&](int rank) { return world.backend(rank); }, dtype, chunk);
      EXPECT_EQ(gloo.traffic.by_purpose, loopback.traffic.by_purpose);
      for (std::size_t rank = 0; rank < gloo.by_rank.size(); ++rank) {
        ASSERT_EQ(gloo.by_rank[rank].size(), loopback.by_rank[rank].size());
        for (std::size_t i = 0; i < gloo.by_rank[rank].size(); ++i) {
          EXPECT_TRUE(same_bits(gloo.by_rank[rank][i], loopback.by_rank[rank][i]))
              << "result " << i << " of rank " << rank << " of " << n << ", chunks of " << chunk;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Gloo, testing::Values(2, 3));

TEST(GlooAxes, EveryAxisOfALayoutConnectsAndCarriesItsOwnMessages) {
  const auto layout = topology::Layout::make(8, {.groups = 2, .shard_degree = 2, .replicate_degree = 2});
  const ServedStore served;
  TrafficCounter counter(groups_by_rank(layout));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < layout.world(); ++rank) {
    threads.emplace_back([&, rank] {
      const auto backend = gloo_backend(served, kLong);
      const Axes axes = make_axes(layout, rank, *backend, counter);
      for (Communicator* axis : {axes.shard.get(), axes.replica.get(), axes.group.get(), axes.federation.get()}) {
        const std::vector<double> mine{static_cast<double>(rank)};
        const auto theirs = axis->collect(mine);
        ASSERT_EQ(theirs.size(), axis->members().ranks.size());
        for (std::size_t i = 0; i < theirs.size(); ++i) EXPECT_EQ(theirs[i][0], axis->members().ranks[i]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Memory of any length of which only a tile is real: the same pages, mapped one after another.
class RepeatedTile {
 public:
  static constexpr std::size_t kTile = std::size_t{1} << 24;

  explicit RepeatedTile(std::size_t tiles) : size_(tiles * kTile) {
    const int file = ::memfd_create("tile", MFD_CLOEXEC);
    base::require(file >= 0 && ::ftruncate(file, kTile) == 0, "no memory file: {}", std::strerror(errno));
    start_ = static_cast<char*>(::mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (std::size_t at = 0; at < size_; at += kTile) {
      const void* mapped = ::mmap(start_ + at, kTile, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
      base::require(mapped == start_ + at, "cannot map a tile: {}", std::strerror(errno));
    }
    ::close(file);
  }
  ~RepeatedTile() { ::munmap(start_, size_); }
  RepeatedTile(const RepeatedTile&) = delete;
  RepeatedTile& operator=(const RepeatedTile&) = delete;

  at::Tensor bytes(std::int64_t count) const { return at::from_blob(start_, {count}, at::kByte); }

 private:
  std::size_t size_;
  char* start_ = nullptr;
};

TEST(GlooMessages, MayBeLongerThan31BitsCount) {
  constexpr std::int64_t kTile = RepeatedTile::kTile, kBytes = (std::int64_t{1} << 31) + 5;
  const ServedStore served;
  const Traffic traffic = on_ring(
      2, [&](int) { return gloo_backend(served, kLong); },
      [&](Communicator& ring) {
        const RepeatedTile memory(kBytes / kTile + 1);
        const at::Tensor tile = memory.bytes(kTile), message = memory.bytes(kBytes);
        const at::Tensor sent = random_buffer(kTile, 0, at::kFloat).mul(50).to(at::kChar).view(at::kByte);
        if (ring.index() == 0) {
          tile.copy_(sent);
          ring.exchange({{1, message}}, {}, Purpose::aggregate)->wait();
        } else {
          ring.exchange({}, {{0, message}}, Purpose::aggregate)->wait();
          // The last tile of the message is a part of one: these five bytes are the last that were written.
          EXPECT_TRUE(at::equal(tile, sent));
        }
        // What follows is in its place.
        const std::vector<double> mine{7.0 + ring.index()};
        EXPECT_EQ(ring.collect(mine), (std::vector<std::vector<double>>{{7}, {8}}));
      });
  EXPECT_EQ(traffic.of(Purpose::aggregate), kBytes);
}

// --- failures

// Runs `body` and returns the message of the PeersLostError it ends with, which must be one line.
template <class Body>
std::string lost(const Body& body) {
  try {
    body();
  } catch (const base::PeersLostError& e) {
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// Rank 0 connects and sends nothing; rank 1 starts an all-gather that can't end. Returns rank 1's error. Rank 0 leaves
// as soon as both are connected, or stays until rank 1 has given up.
std::string error_of_the_waiting_rank(milliseconds deadline, bool peer_stays) {
  const ServedStore served;
  std::promise<void> connected, gave_up;
  std::thread peer([&] {
    const auto transport = gloo_backend(served, deadline)->connect(test_axis(2, 0));
    (peer_stays ? gave_up : connected).get_future().wait();
  });
  TrafficCounter counter({0, 0});
  const Members members = test_axis(2, 1);
  const auto ring = make_ring_communicator(members, gloo_backend(served, deadline)->connect(members), counter);
  connected.set_value();
  const std::string error = lost([&] { ring->all_gather(at::ones({2}), Purpose::gather)->wait(); });
  gave_up.set_value();
  peer.join();
  return error;
}

constexpr const char* kWaiting = "rank 1: all-gather 1 (gather) on the test axis failed while waiting for rank 0: ";

TEST(GlooFailure, PastTheDeadlineNamesTheOperationAndThePeer) {
  const std::string error = error_of_the_waiting_rank(milliseconds(5000), /*peer_stays=*/true);
  EXPECT_EQ(error.find(kWaiting), 0u) << error;
  EXPECT_NE(error.find("5000ms"), std::string::npos) << error;
}

TEST(GlooFailure, OfAPeerThatIsGoneEndsTheWait) {
  const std::string error = error_of_the_waiting_rank(kLong, /*peer_stays=*/false);
  EXPECT_EQ(error.find(kWaiting), 0u) << error;
}

TEST(GlooFailure, APeerThatNeverComesIsAnErrorThatNamesTheAxis) {
  const ServedStore served;
  const std::string error = lost([&] { gloo_backend(served, milliseconds(300))->connect(test_axis(3, 2)); });
  EXPECT_EQ(error.find("rank 2: cannot connect the test axis (3 ranks): "), 0u) << error;
}

TEST(GlooFailure, AnUnknownInterfaceIsNamed) {
  const ServedStore served;
  const auto backend = make_gloo_backend(served.store, {"nosuch0", kHere, kLong});
  const std::string error = lost([&] { backend->connect(test_axis(2, 0)); });
  EXPECT_EQ(error.find("rank 0: cannot connect the test axis (2 ranks over interface nosuch0): "), 0u) << error;
}

TEST(AddressTowards, IsTheAddressOfTheRoute) {
  EXPECT_EQ(address_towards(kHere, 1), kHere);
  const std::string localhost = address_towards("localhost", 29500);  // whichever the machine prefers
  EXPECT_TRUE(localhost == kHere || localhost == "::1") << localhost;
  EXPECT_THROW(address_towards("no..host", 1), base::UsageError);
}

// --- the store below

TEST(StoreOverSockets, GivesWhatAnotherClientHasSet) {
  const ServedStore served;
  const auto first = Store::connect(kHere, served.port, kLong), second = Store::connect(kHere, served.port, kLong);
  const std::string value("a\0b", 3);
  std::thread later([&] { first->set("key", value); });
  EXPECT_EQ(second->get("key"), value);  // waits where it is not there yet
  later.join();
  first->set("key", "new");
  EXPECT_EQ(second->get("key"), "new");
  EXPECT_EQ(served.store->get("key"), "new");
}

TEST(StoreOverSockets, AKeyThatNobodySetsIsNamed) {
  const ServedStore served;
  const auto client = Store::connect(kHere, served.port, milliseconds(300));
  EXPECT_EQ(lost([&] { client->get("fedshard/missing"); }).find("'fedshard/missing' did not appear in the store: "),
            0u);
}

TEST(StoreOverSockets, AStoreThatNobodyServesIsNamed) {
  const BoundSocket silent;  // so that nobody else can listen there
  const std::string error = lost([&] { Store::connect(kHere, silent.port, milliseconds(300)); });
  EXPECT_EQ(error.find(fmt::format("no store answers at 127.0.0.1:{}: ", silent.port)), 0u) << error;
  ::close(silent.fd);
}

}  // namespace
}  // namespace fedshard::comm
