// A rank that fails at any single message of a round, sent or received: a round happens for everyone or not at all.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "fedshard/federation/round.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using testing_support::tiny_model;
using testing_support::tiny_value;

// Counts a rank's messages and lets it fail at one of them.
struct Fault {
  std::atomic<bool> armed = false;
  std::atomic<int> messages = 0;
  int due = 0;  // the message, from 1; 0: none
  void pass() {
    if (armed && ++messages == due) base::fail<base::RunError>("the victim fails");
  }
};

class FaultyTransport final : public comm::Transport {
 public:
  FaultyTransport(std::unique_ptr<comm::Transport> inner, Fault& fault) : inner_(std::move(inner)), fault_(fault) {}
  std::unique_ptr<comm::Request> send(const void* data, std::size_t bytes, int to) override {
    fault_.pass();
    return inner_->send(data, bytes, to);
  }
  std::unique_ptr<comm::Request> receive(void* data, std::size_t bytes, int from) override {
    fault_.pass();
    return inner_->receive(data, bytes, from);
  }

 private:
  std::unique_ptr<comm::Transport> inner_;
  Fault& fault_;
};

class FaultyBackend final : public comm::Backend {
 public:
  FaultyBackend(std::unique_ptr<comm::Backend> inner, Fault& fault) : inner_(std::move(inner)), fault_(fault) {}
  std::unique_ptr<comm::Transport> connect(const comm::Members& members) override {
    return std::make_unique<FaultyTransport>(inner_->connect(members), fault_);
  }

 private:
  std::unique_ptr<comm::Backend> inner_;
  Fault& fault_;
};

// By rank, after a round that begins with `brought`: whether its shard holds these bits (old), or the mean's (new).
struct Shards {
  std::vector<bool> old, is_new;
  int committed = 0;  // rounds, to the coordinator
  int messages = 0;   // of the victim
  std::vector<std::string> errors;
};

float brought(std::int64_t index, int group) { return std::round(tiny_value(index + 31 * group) * 1024) / 1024; }

Shards run(const topology::Layout& layout, int victim, int due) {
  const nn::Model model = tiny_model({});
  const auto mean = [&](std::int64_t index) {
    double sum = 0;
    for (int g = 0; g < layout.groups(); ++g) sum += brought(index, g) / 4.0;
    return static_cast<float>(sum + brought(index, 0) * (4 - layout.groups()) / 4.0);
  };
  FederationOptions options;
  options.weights = {WeighBy::fixed, std::vector<double>(static_cast<std::size_t>(layout.groups()), 1.0)};
  options.weights.fixed[0] = 5 - layout.groups();
  Fault fault;
  fault.due = due;
  Shards shards;
  shards.old.resize(static_cast<std::size_t>(layout.world()));
  shards.is_new.resize(shards.old.size());
  std::mutex mutex;
  const auto body = [&](int rank, comm::Axes& axes, comm::Axes&, control::CoordinatorClient& client) {
    const topology::Coordinates at = layout.at(rank);
    shard::StateRegistry registry;
    shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {}, registry);
    Federation federation(layout, rank, options, engine, axes, client, registry);
    const auto mine = [&](std::int64_t index) { return brought(index, at.group); };
    set_parameters(engine, mine);
    if (rank == victim) fault.armed = true;
    const auto look = [&] {
      const std::lock_guard lock(mutex);
      const auto i = static_cast<std::size_t>(rank);
      shards.old[i] = same_bits(engine.parameters().flat(), arena_of(model.plan, engine.map(), mine));
      shards.is_new[i] = same_bits(engine.parameters().flat(), arena_of(model.plan, engine.map(), mean));
    };
    try {
      federation.run_round({.round = 1, .step = 1, .tokens = 1});
    } catch (const base::Error&) {
      look();
      // Its own error and no echo of one, which the coordinator would wait for a while to hear the cause of.
      if (rank == victim) base::fail<base::RunError>("the victim fails");
      throw;
    }
    look();
  };
  const Aftermath aftermath =
      on_federated_ranks(layout, OverlappingBody(body), [&](int rank, std::unique_ptr<comm::Backend> inner) {
        return rank == victim ? std::make_unique<FaultyBackend>(std::move(inner), fault) : std::move(inner);
      });
  shards.committed = static_cast<int>(aftermath.status.rounds);
  shards.messages = fault.messages;
  shards.errors = aftermath.errors;
  return shards;
}

TEST(MessageFaults, LeaveEveryShardOldOrNewAndNobodyGoesOn) {
  using List = std::vector<int>;
  const std::vector<std::pair<int, topology::LayoutOptions>> layouts{
      {3, {.groups = 3}},
      {4, {.groups = 2}},
      {4, {.groups = List{1, 3}}},
      {4, {.groups = 2, .shard_degree = 1, .replicate_degree = 2}},
      {6, {.groups = List{4, 2}, .shard_degree = List{2, 1}, .replicate_degree = -1}},
  };
  int tried = 0;
  for (const auto& [world, options] : layouts) {
    const topology::Layout layout = topology::Layout::make(world, options);
    for (int victim = 0; victim < world; ++victim) {
      const Shards sound = run(layout, victim, 0);
      ASSERT_EQ(sound.committed, 1);
      for (int rank = 0; rank < world; ++rank) ASSERT_TRUE(sound.is_new[static_cast<std::size_t>(rank)]);
      ASSERT_GT(sound.messages, 0);
      for (int due = 1; due <= sound.messages; ++due, ++tried) {
        SCOPED_TRACE(
            fmt::format("{}: rank {} fails at its message {} of {}", layout.describe(), victim, due, sound.messages));
        const Shards after = run(layout, victim, due);
        EXPECT_EQ(after.committed, 0);
        for (int rank = 0; rank < world; ++rank) {
          const auto i = static_cast<std::size_t>(rank);
          EXPECT_TRUE(after.old[i] || after.is_new[i]) << "rank " << rank << " holds a mixture";
          EXPECT_NE(after.errors[i], "") << "rank " << rank << " goes on";
        }
        ASSERT_FALSE(testing::Test::HasFailure());
      }
    }
  }
  EXPECT_GT(tried, 100);
}

}  // namespace
}  // namespace fedshard::federation
