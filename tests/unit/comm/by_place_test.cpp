#include "fedshard/comm/by_place.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "fedshard/comm/axes.h"
#include "fedshard/comm/loopback.h"

namespace fedshard::comm {
namespace {

// Notes whom it was asked to connect.
class Notes final : public Backend {
 public:
  explicit Notes(std::vector<std::string>& names) : names_(names) {}
  std::unique_ptr<Transport> connect(const Members& members) override {
    names_.push_back(members.name);
    return nullptr;
  }

 private:
  std::vector<std::string>& names_;
};

TEST(ByPlace, OnlyCommunicatorsThatAreAllHereStayInside) {
  std::vector<std::string> inside, between;
  const auto backend =
      make_backend_by_place({1, 4, 7}, std::make_unique<Notes>(inside), std::make_unique<Notes>(between));
  backend->connect({"all", {1, 4, 7}, 1});
  backend->connect({"some", {4, 7}, 0});
  backend->connect({"one", {4}, 0});
  backend->connect({"first elsewhere", {0, 1, 4}, 2});
  backend->connect({"last elsewhere", {4, 8}, 0});
  backend->connect({"more", {1, 4, 7, 10}, 1});
  EXPECT_EQ(inside, (std::vector<std::string>{"all", "some", "one"}));
  EXPECT_EQ(between, (std::vector<std::string>{"first elsewhere", "last elsewhere", "more"}));
}

// Two processes with a rank of each of three groups: sums along every axis, and bytes as without places.
TEST(ByPlace, AxesWorkAndCountAlike) {
  constexpr int kProcesses = 2;
  const auto layout = topology::Layout::make(6, {.groups = 3});
  const auto sums_with = [&](const std::function<std::unique_ptr<Backend>(int rank)>& backend_of,
                             TrafficCounter& counter) {
    std::vector<std::vector<double>> sums(6);
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 6; ++rank) {
      threads.emplace_back([&, rank] {
        const auto backend = backend_of(rank);
        const Axes axes = make_axes(layout, rank, *backend, counter);
        for (Communicator* axis : {axes.shard.get(), axes.replica.get(), axes.group.get(), axes.federation.get()}) {
          std::vector<double> value{1.0 + rank};
          axis->sum(value);
          const at::Tensor buffer = at::full({6}, 1.0 + rank, at::kFloat);
          axis->all_reduce(buffer, Purpose::aggregate)->wait();
          sums[rank].push_back(value[0]);
          sums[rank].push_back(buffer[5].item<double>());
        }
      });
    }
    threads.clear();
    return sums;
  };
  LoopbackWorld world, between, first, second;
  TrafficCounter counter(groups_by_rank(layout)), plain(groups_by_rank(layout));
  const auto by_place = [&](int rank) {
    const int process = rank % kProcesses;
    return make_backend_by_place({process, 2 + process, 4 + process}, (process == 0 ? first : second).backend(rank),
                                 between.backend(rank));
  };
  const auto sums = sums_with(by_place, counter);
  EXPECT_EQ(sums[3], (std::vector<double>{7, 7, 4, 4, 7, 7, 12, 12}));  // group 1: ranks 2, 3; twins: ranks 1, 3, 5
  EXPECT_EQ(sums, sums_with([&](int rank) { return world.backend(rank); }, plain));
  EXPECT_EQ(counter.read().by_purpose, plain.read().by_purpose);
  EXPECT_EQ(counter.read().intra_group, plain.read().intra_group);
  EXPECT_EQ(counter.read().inter_group, plain.read().inter_group);
  EXPECT_GT(counter.read().inter_group, 0);
}

}  // namespace
}  // namespace fedshard::comm
