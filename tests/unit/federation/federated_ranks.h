// Runs the ranks of a layout as threads that share a coordinator, and lets a test come between a rank and its peers.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/control/client.h"
#include "fedshard/control/coordinator.h"
#include "fedshard/shard/engine.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::federation {

struct Shape {
  int groups = 1, replicas = 1, shards = 1;
  topology::Layout layout() const {
    return topology::Layout::make(groups * replicas * shards,
                                  {.groups = groups, .shard_degree = shards, .replicate_degree = replicas});
  }
};

inline std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.groups << " groups of " << s.replicas << " replicas of " << s.shards << " shards";
}

// What the coordinator knows in the end.
struct Aftermath {
  control::CoordinatorStatus status;
  std::vector<nlohmann::json> rounds;  // their records
  std::vector<std::string> errors;     // by rank; empty where the rank ended well
  comm::Traffic traffic;
};

using RankBody = std::function<void(int rank, comm::Axes&, control::CoordinatorClient&)>;
// With a second set of axes, for what runs beside training.
using OverlappingBody = std::function<void(int rank, comm::Axes&, comm::Axes&, control::CoordinatorClient&)>;

struct Patience {
  std::chrono::milliseconds message = std::chrono::seconds(30);
  double heartbeat_s = 1, echo_s = control::Deadlines{}.echo;
};

// Calls `body` for every rank. One that throws reports its error and breaks the connections, as a process that dies.
inline Aftermath on_federated_ranks(const topology::Layout& layout, const OverlappingBody& body,
                                    const testing_support::BackendWrap& wrap = nullptr, const Patience& patience = {}) {
  Aftermath aftermath;
  aftermath.errors.resize(static_cast<std::size_t>(layout.world()));
  std::mutex mutex;
  control::CoordinatorOptions options;
  options.group_sizes = layout.sizes();
  options.deadlines.echo = patience.echo_s;
  options.sink = [&](const nlohmann::json& line) {
    if (line["kind"] == "round") aftermath.rounds.push_back(line);
  };
  const control::RunToken token = options.token;
  control::Coordinator coordinator(std::move(options));
  try {
    aftermath.traffic = testing_support::on_ranks(
        layout,
        [&](int rank, comm::Axes& axes, comm::Axes& others) {
          control::ClientOptions mine{coordinator.endpoint(), token};
          mine.rank = rank;
          mine.group = layout.group_of(rank);
          mine.heartbeat_s = patience.heartbeat_s;
          control::CoordinatorClient client(std::move(mine));
          try {
            body(rank, axes, others, client);
            client.goodbye(0);
          } catch (const base::Error& e) {
            client.report_error(e.what(), static_cast<int>(e.status()));
            const std::lock_guard lock(mutex);
            aftermath.errors[static_cast<std::size_t>(rank)] = e.what();
            throw;
          }
        },
        wrap, patience.message);
  } catch (const base::Error&) {
    EXPECT_NE(aftermath.errors, std::vector<std::string>(aftermath.errors.size()));  // they are the test's to judge
  }
  coordinator.stop();
  aftermath.status = coordinator.status();
  return aftermath;
}

inline Aftermath on_federated_ranks(const topology::Layout& layout, const RankBody& body) {
  return on_federated_ranks(layout, [&](int rank, comm::Axes& axes, comm::Axes&, control::CoordinatorClient& client) {
    body(rank, axes, client);
  });
}

// What a test does when a rank's communicator is used. `number` counts the uses from 1.
struct Hooks {
  std::function<void(int number)> before_exchange{}, after_exchange{};
  std::function<void(int number, std::vector<comm::Parcel>& received)> change_received{};
  std::function<void(const at::Tensor& buffer)> change_gathered{};  // of gathers of unequal chunks
};

class HookedCommunicator final : public comm::Communicator {
 public:
  HookedCommunicator(std::unique_ptr<comm::Communicator> inner, Hooks hooks)
      : Communicator(inner->members()), inner_(std::move(inner)), hooks_(std::move(hooks)) {}

  comm::WorkPtr all_gather(const at::Tensor& buffer, comm::Purpose purpose, comm::WorkPtr after) override {
    return inner_->all_gather(buffer, purpose, std::move(after));
  }
  comm::WorkPtr all_gather(const at::Tensor& buffer, std::vector<std::int64_t> counts, comm::Purpose purpose,
                           comm::WorkPtr after) override {
    comm::WorkPtr work = inner_->all_gather(buffer, std::move(counts), purpose, std::move(after));
    work->wait();
    if (hooks_.change_gathered) hooks_.change_gathered(buffer);
    return work;
  }
  comm::WorkPtr reduce_scatter(const at::Tensor& buffer, comm::Purpose purpose, comm::WorkPtr after) override {
    return inner_->reduce_scatter(buffer, purpose, std::move(after));
  }
  comm::WorkPtr all_reduce(const at::Tensor& buffer, comm::Purpose purpose, comm::WorkPtr after) override {
    return inner_->all_reduce(buffer, purpose, std::move(after));
  }
  comm::WorkPtr exchange(std::vector<comm::Parcel> sends, std::vector<comm::Parcel> receives, comm::Purpose purpose,
                         comm::WorkPtr after) override {
    ++exchanges_;
    if (hooks_.before_exchange) hooks_.before_exchange(exchanges_);
    comm::WorkPtr work = inner_->exchange(std::move(sends), receives, purpose, std::move(after));
    work->wait();
    if (hooks_.change_received) hooks_.change_received(exchanges_, receives);
    if (hooks_.after_exchange) hooks_.after_exchange(exchanges_);
    return work;
  }

 private:
  std::unique_ptr<comm::Communicator> inner_;
  Hooks hooks_;
  int exchanges_ = 0;
};

inline void hook(std::unique_ptr<comm::Communicator>& communicator, Hooks hooks) {
  communicator = std::make_unique<HookedCommunicator>(std::move(communicator), std::move(hooks));
}

inline void flip_lowest_bit(float& value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  bits ^= 1;
  std::memcpy(&value, &bits, sizeof bits);
}

// out[i]: of the i-th element of `range`.
inline void fill_by_index(const plan::ModelPlan& plan, int unit, topology::Range range, float* out,
                          const std::function<float(std::int64_t index)>& value) {
  for (const plan::GlobalRun& run : plan.global_runs(unit, range)) {
    for (std::int64_t i = 0; i < run.range.size(); ++i) out[run.range.begin - range.begin + i] = value(run.index + i);
  }
}

// Sets the parameters by global index.
inline void set_parameters(shard::Engine& engine, const std::function<float(std::int64_t index)>& value) {
  engine.fill([&](int unit, topology::Range range, std::span<float> out) {
    fill_by_index(engine.plan(), unit, range, out.data(), value);
  });
}

// Bits, not values: NaN and the sign of zero count.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

// The same layout of arena, filled by global index; padding and gaps are zero.
inline at::Tensor arena_of(const plan::ModelPlan& plan, const shard::ArenaMap& map,
                           const std::function<float(std::int64_t index)>& value) {
  const shard::Arena arena(map);
  for (int u = 0; u < map.units(); ++u) {
    fill_by_index(plan, u, map.range(u), arena.real(u).mutable_data_ptr<float>(), value);
  }
  return arena.flat();
}

}  // namespace fedshard::federation
