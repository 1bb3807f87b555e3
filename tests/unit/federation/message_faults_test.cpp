// A rank that fails, hangs or loses a link at any single message of a round, sent or received: a round happens for
// everyone or not at all.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>

#include "fedshard/federation/round.h"
#include "tests/unit/federation/federated_ranks.h"

namespace fedshard::federation {
namespace {

using testing_support::tiny_model;
using testing_support::tiny_value;

enum class Kind {
  dies,
  hangs,       // until everybody else has ended; then it goes on
  loses_link,  // nothing goes between it and that peer any more, but both are there
};

constexpr std::chrono::milliseconds kMessagePatience(200);

// Counts a rank's messages and lets something happen at one of them.
struct Fault {
  Kind kind = Kind::dies;
  std::atomic<bool> armed = false;
  std::atomic<int> messages = 0, others = 0;  // others: ranks that have not ended
  int due = 0;                                // the message, from 1; 0: none
  int cut_off = -1;                           // the rank to which the link is lost
  // Whether the message gets through.
  bool pass(int peer) {
    if (armed && ++messages == due) {
      if (kind == Kind::dies) base::fail<base::RunError>("the victim fails");
      if (kind == Kind::loses_link) cut_off = peer;
      while (kind == Kind::hangs && others > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return peer != cut_off;
  }
};

struct Swallowed final : comm::Request {
  void wait() override {}
};

struct Never final : comm::Request {
  void wait() override {
    std::this_thread::sleep_for(kMessagePatience);
    base::fail<base::PeersLostError>("no message came");
  }
};

class FaultyTransport final : public comm::Transport {
 public:
  FaultyTransport(std::unique_ptr<comm::Transport> inner, comm::Members members, Fault& fault)
      : inner_(std::move(inner)), members_(std::move(members)), fault_(fault) {}
  std::unique_ptr<comm::Request> send(const void* data, std::size_t bytes, int to) override {
    if (!fault_.pass(rank_of(to))) return std::make_unique<Swallowed>();
    return inner_->send(data, bytes, to);
  }
  std::unique_ptr<comm::Request> receive(void* data, std::size_t bytes, int from) override {
    if (!fault_.pass(rank_of(from))) return std::make_unique<Never>();
    return inner_->receive(data, bytes, from);
  }

 private:
  int rank_of(int index) const { return members_.ranks[static_cast<std::size_t>(index)]; }
  std::unique_ptr<comm::Transport> inner_;
  comm::Members members_;
  Fault& fault_;
};

class FaultyBackend final : public comm::Backend {
 public:
  FaultyBackend(std::unique_ptr<comm::Backend> inner, Fault& fault) : inner_(std::move(inner)), fault_(fault) {}
  std::unique_ptr<comm::Transport> connect(const comm::Members& members) override {
    return std::make_unique<FaultyTransport>(inner_->connect(members), members, fault_);
  }

 private:
  std::unique_ptr<comm::Backend> inner_;
  Fault& fault_;
};

// By rank, after a round that begins with `brought`: whether its shard holds these bits (old), or the mean's (new), and
// likewise the anchor of its slice.
struct Shards {
  std::vector<bool> old, is_new;
  int committed = 0;  // rounds, to the coordinator
  int messages = 0;   // of the victim
  std::vector<std::string> errors;
};

float brought(std::int64_t index, int group) { return std::round(tiny_value(index + 31 * group) * 1024) / 1024; }

float anchor_at(std::int64_t index) { return 3 * tiny_value(index); }

// The outer optimizer leads to the mean, but by way of an anchor and a momentum.
FederationOptions options_of(const topology::Layout& layout) {
  FederationOptions options;
  options.weights = {WeighBy::fixed, std::vector<double>(static_cast<std::size_t>(layout.groups()), 1.0)};
  options.weights.fixed[0] = 5 - layout.groups();
  options.outer = plan::usual_options(plan::Outer::nesterov);
  options.outer.lr = 1;
  options.outer.momentum = 0;
  return options;
}

const shard::Arena& state_of(const shard::StateRegistry& registry, std::string_view name) {
  for (const shard::State& state : registry.all()) {
    if (state.name == name) return *state.arena;
  }
  throw std::out_of_range(std::string(name));
}

// The anchor's elements as those of the shard; zero where another replica has them.
bool holds(const shard::Arena& slice, const plan::ModelPlan& plan, const std::function<float(std::int64_t)>& value) {
  for (const shard::ArenaPiece& piece : slice.map().pieces()) {
    std::vector<float> expected(static_cast<std::size_t>(piece.range.size()));
    fill_by_index(plan, piece.unit, piece.range, expected.data(), value);
    const at::Tensor held = slice.slice(piece.unit, piece.range);
    if (std::memcmp(held.const_data_ptr<float>(), expected.data(), expected.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

Shards run(const topology::Layout& layout, Kind kind, int victim, int due, const topology::ExchangeRules& rules) {
  const nn::Model model = tiny_model({});
  const auto mean = [&](std::int64_t index) {
    double sum = 0;
    for (int g = 0; g < layout.groups(); ++g) sum += brought(index, g) / 4.0;
    return static_cast<float>(sum + brought(index, 0) * (4 - layout.groups()) / 4.0);
  };
  Fault fault;
  fault.kind = kind;
  fault.due = due;
  fault.others = layout.world() - 1;
  Shards shards;
  shards.old.resize(static_cast<std::size_t>(layout.world()));
  shards.is_new.resize(shards.old.size());
  std::mutex mutex;
  const auto body = [&](int rank, comm::Axes& axes, comm::Axes&, control::CoordinatorClient& client) {
    const topology::Coordinates at = layout.at(rank);
    shard::StateRegistry registry;
    shard::Engine engine(model, layout.group(at.group).shards, at.shard, axes, {}, registry);
    FederationOptions options = options_of(layout);
    options.exchange = rules;
    Federation federation(layout, rank, options, engine, axes, client, registry);
    set_parameters(engine, anchor_at);
    federation.set_anchor();
    const auto mine = [&](std::int64_t index) { return brought(index, at.group); };
    set_parameters(engine, mine);
    if (rank == victim) fault.armed = true;
    const auto look = [&] {
      const std::lock_guard lock(mutex);
      const auto i = static_cast<std::size_t>(rank);
      const shard::Arena& anchor = state_of(registry, "anchor");
      shards.old[i] = same_bits(engine.parameters().flat(), arena_of(model.plan, engine.map(), mine)) &&
                      holds(anchor, model.plan, anchor_at);
      shards.is_new[i] = same_bits(engine.parameters().flat(), arena_of(model.plan, engine.map(), mean)) &&
                         holds(anchor, model.plan, mean);
      if (rank != victim) --fault.others;
    };
    try {
      federation.run_round({.round = 1, .step = 1, .tokens = 1});
    } catch (const base::Error&) {
      look();
      // Its own error and no echo of one, which the coordinator would wait for a while to hear the cause of.
      if (rank == victim && kind == Kind::dies) base::fail<base::RunError>("the victim fails");
      throw;
    }
    look();
  };
  const Patience patience =
      kind == Kind::dies ? Patience{} : Patience{.message = kMessagePatience, .heartbeat_s = 0.02, .echo_s = 0.1};
  const auto wrap = [&](int rank, std::unique_ptr<comm::Backend> inner) {
    return rank == victim ? std::make_unique<FaultyBackend>(std::move(inner), fault) : std::move(inner);
  };
  const Aftermath aftermath = on_federated_ranks(layout, OverlappingBody(body), wrap, patience);
  shards.committed = static_cast<int>(aftermath.status.rounds);
  shards.messages = fault.messages;
  shards.errors = aftermath.errors;
  return shards;
}

// What happened to each of the victim's messages in turn: how often nobody took the new parameters, and how often all.
struct Tally {
  int old = 0, is_new = 0;
};

void try_each_message(const topology::Layout& layout, Kind kind, int victim, Tally& tally,
                      const topology::ExchangeRules& rules = {}) {
  const Shards sound = run(layout, Kind::dies, victim, 0, rules);
  ASSERT_EQ(sound.committed, 1);
  for (int rank = 0; rank < layout.world(); ++rank) ASSERT_TRUE(sound.is_new[static_cast<std::size_t>(rank)]);
  ASSERT_GT(sound.messages, 0);
  for (int due = 1; due <= sound.messages; ++due) {
    SCOPED_TRACE(fmt::format("{}: rank {}, its message {} of {}", layout.describe(), victim, due, sound.messages));
    const Shards after = run(layout, kind, victim, due, rules);
    EXPECT_EQ(after.committed, 0);
    for (int rank = 0; rank < layout.world(); ++rank) {
      const auto i = static_cast<std::size_t>(rank);
      EXPECT_TRUE(after.old[i] != after.is_new[i]) << "rank " << rank << " holds a mixture";
      EXPECT_EQ(after.is_new[i], after.is_new[0]) << "rank " << rank << " differs from rank 0";
      EXPECT_NE(after.errors[i], "") << "rank " << rank << " goes on";
    }
    ++(after.is_new[0] ? tally.is_new : tally.old);
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

using List = std::vector<int>;

TEST(MessageFaults, LeaveTheSameRoundToAllAndNobodyGoesOn) {
  const std::vector<std::pair<int, topology::LayoutOptions>> layouts{
      {3, {.groups = 3}},
      {4, {.groups = 2}},
      {4, {.groups = List{1, 3}}},
      {4, {.groups = 2, .shard_degree = 1, .replicate_degree = 2}},
      {6, {.groups = List{4, 2}, .shard_degree = List{2, 1}, .replicate_degree = -1}},
  };
  Tally tally;
  for (const auto& [world, options] : layouts) {
    for (int victim = 0; victim < world; ++victim) {
      try_each_message(topology::Layout::make(world, options), Kind::dies, victim, tally);
      ASSERT_FALSE(HasFatalFailure());
    }
  }
  EXPECT_GT(tally.old, 100);
  EXPECT_GT(tally.is_new, 0);
}

TEST(MessageFaults, InEverySchemeAndInBuckets) {
  using topology::Scheme;
  const topology::Buckets buckets{topology::Buckets::By::size, 150};
  const auto layout = topology::Layout::make(4, {.groups = 2, .shard_degree = 1, .replicate_degree = 2});
  Tally tally;
  for (const Scheme scheme : {Scheme::split, Scheme::leader, Scheme::naive}) {
    for (const int victim : {0, 3}) {
      try_each_message(layout, Kind::dies, victim, tally, {scheme, buckets, 2});
      ASSERT_FALSE(HasFatalFailure());
    }
  }
  EXPECT_GT(tally.old, 50);
}

// As a process that is stopped, or a host that is not reached any more: nobody gets an error, only silence.
TEST(MessageFaults, OfARankThatHangsOrALinkThatIsCut) {
  const topology::Layout layout =
      topology::Layout::make(3, {.groups = List{1, 2}, .shard_degree = 1, .replicate_degree = -1});
  for (const Kind kind : {Kind::hangs, Kind::loses_link}) {
    Tally tally;
    for (const int victim : {0, 2}) {
      try_each_message(layout, kind, victim, tally);
      ASSERT_FALSE(HasFatalFailure());
    }
    EXPECT_GT(tally.old, 10);
    EXPECT_GT(tally.is_new, 0);
  }
}

}  // namespace
}  // namespace fedshard::federation
