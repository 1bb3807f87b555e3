// The coordinator and its clients over real sockets, ranks as threads.
#include "fedshard/control/coordinator.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <vector>
#include <zmq.hpp>

#include "fedshard/base/error.h"
#include "fedshard/control/client.h"
#include "fedshard/control/membership.h"
#include "tests/unit/control/expect_error.h"

namespace fedshard::control {
namespace {

using base::PeersLostError;
using base::RunError;
using base::UsageError;

constexpr double kLong = 60;  // a deadline that no test should reach

// Polls until `done` holds; false after a minute.
template <class Done>
bool eventually(const Done& done) {
  for (int i = 0; i < 6000; ++i) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

struct Job {
  explicit Job(std::vector<int> group_sizes, Deadlines deadlines = {}, const base::Clock* clock = nullptr)
      : sizes(group_sizes), members(group_sizes), coordinator(options(deadlines, clock)) {}

  CoordinatorOptions options(const Deadlines& deadlines, const base::Clock* clock) {
    CoordinatorOptions o;
    o.group_sizes = sizes;
    o.token = token;
    o.deadlines = deadlines;
    o.clock = clock;
    o.sink = [this](const nlohmann::json& line) {
      const std::lock_guard lock(mutex);
      records.push_back(line);
    };
    return o;
  }
  ClientOptions client(int rank) const {
    ClientOptions o{coordinator.endpoint(), token};
    o.rank = rank;
    o.group = members.group_of(rank);
    o.version = "1";
    o.config_digest = "c";
    o.join_s = o.answer_s = kLong;
    o.heartbeat_s = 0.05;
    return o;
  }
  // Runs `body` for every rank, each in a thread of its own.
  template <class Body>
  void as_ranks(const Body& body) {
    std::vector<std::future<void>> ranks;
    for (int rank = 0; rank < members.ranks(); ++rank) {
      ranks.push_back(std::async(std::launch::async, [&body, rank] { body(rank); }));
    }
    for (auto& rank : ranks) rank.get();
  }

  std::vector<int> sizes;
  Membership members;
  RunToken token = RunToken::random();
  std::mutex mutex;
  std::vector<nlohmann::json> records;
  Coordinator coordinator;  // last: its thread uses the others
};

// What every rank does in a run without faults.
void train(Job& run, int rank, int rounds) {
  CoordinatorClient client(run.client(rank));
  const int group = run.members.group_of(rank);
  for (int round = 1; round <= rounds; ++round) {
    client.set_step(round);
    client.begin_collective("gather");
    client.record({{"kind", "step"}, {"step", round}, {"group", group}});
    const RoundPlan plan = client.propose(round, group + 5, 10 * (group + 1), rank == 0 && round == rounds);
    EXPECT_EQ(plan.round, round);
    EXPECT_EQ(plan.tokens.size(), run.sizes.size());
    EXPECT_EQ(plan.tokens.back(), 10 * static_cast<std::int64_t>(run.sizes.size()));
    EXPECT_EQ(plan.steps.back(), static_cast<std::int64_t>(run.sizes.size()) + 4);
    EXPECT_EQ(plan.stop, round == rounds);
    EXPECT_EQ(client.ready(round, plan.epoch).participants, plan.participants);
    const bool is_first = run.members.first_rank(group) == rank;
    RoundMeasures measures{round, {}, {}, 1, 0, 1};
    measures.traffic.gather = rank + 1;
    EXPECT_EQ(client.digest(round, is_first ? 1000 + round : 0, measures).digest, 1000U + round);
  }
  EXPECT_EQ(client.collectives(), rounds);
  client.goodbye(0);
}

TEST(Coordinator, RoundsOfOneTwoAndThreeGroups) {
  constexpr int kRounds = 5;
  for (const std::vector<int>& sizes : std::vector<std::vector<int>>{{1}, {3}, {1, 1}, {2, 2}, {3, 1, 2}}) {
    Job run(sizes);
    run.as_ranks([&](int rank) { train(run, rank, kRounds); });
    ASSERT_TRUE(run.coordinator.wait_until_over(kLong));
    run.coordinator.stop();
    const auto status = run.coordinator.status();
    EXPECT_FALSE(status.first_error);
    EXPECT_EQ(status.rounds, kRounds);
    EXPECT_EQ(status.ended.size(), static_cast<std::size_t>(run.members.ranks()));
    EXPECT_EQ(status.rejected_frames, 0) << status.last_rejection;
    EXPECT_EQ(status.refused_clients, 0);
    EXPECT_EQ(status.latest_step.back()["step"], kRounds);
    const std::int64_t ranks = run.members.ranks();
    ASSERT_EQ(std::ssize(run.records), kRounds * (ranks + 2));
    const auto& round = *std::prev(run.records.end(), 2);
    EXPECT_EQ(round["kind"], "round");
    EXPECT_EQ(round["drift"].size(), sizes.size());
    EXPECT_EQ(run.records.back()["kind"], "traffic");
    EXPECT_EQ(run.records.back()["step"], kRounds);
    EXPECT_EQ(run.records.back()["gather"], ranks * (ranks + 1) / 2);
    double last = 0;
    for (const auto& record : run.records) {
      EXPECT_GE(record["time_s"], last);
      last = record["time_s"];
    }
  }
}

TEST(Coordinator, AWrongTokenIsRefused) {
  Job run({1});
  ClientOptions stranger = run.client(0);
  stranger.join_s = 0.5;
  stranger.token = RunToken::random();
  expect_error<PeersLostError>([&] { CoordinatorClient client(stranger); }, "did not answer within 0.5 s");
  // Knowing the server's key is not enough.
  stranger.token = RunToken::parse(run.token.server_secret() + RunToken::random().client_secret());
  stranger.join_s = kLong;
  expect_error<UsageError>([&] { CoordinatorClient client(stranger); }, "the run token is not its own");
  EXPECT_EQ(run.coordinator.status().refused_clients, 1);
  EXPECT_TRUE(run.coordinator.status().joined.empty());
  train(run, 0, 1);  // the right one is let in all the same
}

TEST(Coordinator, NobodyAtTheEndpoint) {
  Job run({1});
  ClientOptions options = run.client(0);
  run.coordinator.stop();
  options.join_s = 0.2;
  expect_error<PeersLostError>([&] { CoordinatorClient client(options); }, "rank 0 (group 0): the coordinator at tcp:");
  options.endpoint = "nonsense";
  expect_error<UsageError>([&] { CoordinatorClient client(options); }, "'nonsense' is no endpoint");
}

TEST(Coordinator, AnAddressOfOthersIsRefused) {
  CoordinatorOptions options;
  options.group_sizes = {1};
  options.bind_address = "192.0.2.1";
  expect_error<UsageError>([&] { Coordinator coordinator(options); }, "cannot listen on '192.0.2.1'");
}

// A socket with the right keys and the wrong manners.
zmq::socket_t raw_socket(zmq::context_t& context, const Job& run, const std::string& name) {
  zmq::socket_t socket(context, zmq::socket_type::dealer);
  socket.set(zmq::sockopt::linger, 1000);
  socket.set(zmq::sockopt::routing_id, name);
  socket.set(zmq::sockopt::curve_serverkey, run.token.server_public());
  socket.set(zmq::sockopt::curve_publickey, run.token.client_public());
  socket.set(zmq::sockopt::curve_secretkey, run.token.client_secret());
  socket.connect(run.coordinator.endpoint());
  return socket;
}

TEST(Coordinator, MalformedFramesAreCountedAndDoNoHarm) {
  Job run({2});
  zmq::context_t context;
  std::int64_t sent = 0;
  for (const std::string name : {"0", "1", "2", "-1", "x", "0x", "99999999999999999999"}) {
    zmq::socket_t socket = raw_socket(context, run, name);
    for (const std::string frame :
         {"", "{", "\xff", "[1]", R"({"v":1,"type":"ready"})", R"({"v":1,"type":"welcome"})"}) {
      socket.send(zmq::buffer(frame), zmq::send_flags::none);
      ++sent;
    }
    socket.send(zmq::str_buffer("two"), zmq::send_flags::sndmore);
    socket.send(zmq::str_buffer("parts"), zmq::send_flags::none);
    ++sent;
  }
  EXPECT_TRUE(eventually([&] { return run.coordinator.status().rejected_frames == sent; }));
  EXPECT_FALSE(run.coordinator.status().first_error);
  run.as_ranks([&](int rank) { train(run, rank, 2); });
  EXPECT_EQ(run.coordinator.status().rounds, 2);
}

TEST(Coordinator, DifferentDigestsEndTheRun) {
  Job run({1, 2});
  run.as_ranks([&](int rank) {
    CoordinatorClient client(run.client(rank));
    client.ready(1, client.propose(1, 5, 10, false).epoch);
    expect_error<RunError>([&] { client.digest(1, rank == 0 ? 5 : 4, {}); },
                           "the groups do not hold the same parameters");
    client.goodbye(1);
  });
  run.coordinator.stop();
  EXPECT_EQ(run.coordinator.status().first_error->status, 1);
  EXPECT_EQ(run.coordinator.status().first_error->rank, -1);
  EXPECT_EQ(run.coordinator.status().rounds, 0);
  EXPECT_TRUE(run.records.empty());
}

TEST(Coordinator, AnErrorReachesTheOthersAndWins) {
  Job run({2, 1});
  std::atomic<int> callbacks{0};
  std::barrier everybody(3);
  run.as_ranks([&](int rank) {
    ClientOptions options = run.client(rank);
    options.on_abort = [&](const Abort&) { ++callbacks; };
    CoordinatorClient client(options);
    EXPECT_TRUE(eventually([&] { return run.coordinator.status().joined.size() == 3; }));
    everybody.arrive_and_wait();
    if (rank == 1) {
      client.set_step(3);
      client.begin_collective("reduce block.1");
      client.report_error("the loss is NaN", 1);
      expect_error<RunError>([&] { client.record({{"kind", "step"}}); }, "after its last word");
      return;
    }
    expect_error<PeersLostError>([&] { client.propose(1, 5, 10, false); }, "rank 1 (group 0) failed: the loss is NaN");
    EXPECT_EQ(client.aborted()->status, 4);
    expect_error<PeersLostError>([&] { client.throw_if_aborted(); }, "the loss is NaN");
    client.report_error("my peers are lost", 4);
  });
  run.coordinator.stop();
  EXPECT_EQ(callbacks, 2);
  EXPECT_EQ(run.coordinator.status().first_error->message, "the loss is NaN");
  EXPECT_EQ(run.coordinator.status().first_error->status, 1);
  EXPECT_EQ(run.coordinator.status().failed, (std::vector<int>{0, 1, 2}));
}

TEST(Coordinator, ASilentRankIsFoundByTheClock) {
  base::ManualClock clock;
  Job run({2}, {}, &clock);
  ClientOptions quiet = run.client(1);
  quiet.heartbeat_s = 1e6;
  CoordinatorClient silent(quiet);
  CoordinatorClient alive(run.client(0));
  clock.advance(29);
  alive.record({{"kind", "step"}});
  EXPECT_TRUE(eventually([&] {
    const std::lock_guard lock(run.mutex);
    return run.records.size() == 1;  // so it has been heard at 29
  }));
  EXPECT_FALSE(run.coordinator.status().aborted);
  auto waits = std::async(std::launch::async, [&] {
    expect_error<PeersLostError>([&] { alive.propose(1, 5, 10, false); }, "rank 1 sent nothing for 30 s");
  });
  clock.advance(2);
  waits.get();
  EXPECT_TRUE(eventually([&] { return silent.aborted().has_value(); }));
  EXPECT_EQ(run.coordinator.status().first_error->rank, 1);
}

TEST(Coordinator, ARankThatNeverJoinsIsNamed) {
  Deadlines deadlines;
  deadlines.join = 0.3;
  Job run({1, 1}, deadlines);
  CoordinatorClient client(run.client(0));
  expect_error<PeersLostError>([&] { client.propose(1, 5, 10, false); }, "rank 1 did not join within 0.3 s");
}

TEST(Coordinator, ALateProposalIsNamed) {
  Deadlines deadlines;
  deadlines.round = 0.3;
  Job run({1, 1}, deadlines);
  CoordinatorClient late(run.client(1));
  CoordinatorClient client(run.client(0));
  expect_error<PeersLostError>([&] { client.propose(1, 5, 10, false); },
                               "rank 1 did not propose for round 1 within 0.3 s");
}

TEST(Coordinator, AClientsOwnDeadline) {
  Job run({1, 1});
  ClientOptions options = run.client(0);
  options.answer_s = 0.2;
  CoordinatorClient client(options);
  expect_error<PeersLostError>([&] { client.propose(6, 5, 10, false); }, "round 6: waiting for all ranks to propose");
}

TEST(Coordinator, AClientNoticesThatItsCoordinatorIsGone) {
  Job run({1, 1});
  auto coordinator = std::make_unique<Coordinator>(run.options({}, nullptr));
  std::atomic<bool> told = false;
  ClientOptions options = run.client(0);
  options.endpoint = coordinator->endpoint();
  options.silence_s = 0.5;
  options.on_abort = [&](const Abort& abort) { told = abort.status == 4; };
  CoordinatorClient client(options);
  const auto proposed = std::async(std::launch::async, [&] {
    expect_error<PeersLostError>([&] { client.propose(1, 5, 10, false); }, "has not answered for 0.5 s");
  });
  coordinator.reset();
  proposed.wait();
  EXPECT_TRUE(told);
}

// Longer than its patience, but the coordinator is there.
TEST(Coordinator, AClientWaitsForOthersAsLongAsItIsAnswered) {
  Job run({1, 1});
  ClientOptions options = run.client(0);
  options.silence_s = 0.5;
  CoordinatorClient client(options), other(run.client(1));
  const auto proposed = std::async(std::launch::async, [&] { EXPECT_EQ(client.propose(1, 5, 10, false).round, 1); });
  std::this_thread::sleep_for(std::chrono::seconds(2));
  other.propose(1, 5, 10, false);
  proposed.wait();
}

TEST(Coordinator, OtherConfigurationsAreRefused) {
  Job run({1, 1});
  CoordinatorClient first(run.client(0));
  ClientOptions options = run.client(1);
  options.config_digest = "d";
  expect_error<UsageError>([&] { CoordinatorClient second(options); }, "has another configuration than rank 0");
  expect_error<UsageError>([&] { first.propose(1, 5, 10, false); }, "has another configuration");
}

TEST(Coordinator, ARecordThatCannotBeKeptEndsTheRun) {
  Job run({1});
  CoordinatorOptions options = run.options({}, nullptr);
  options.sink = [](const nlohmann::json&) { base::fail<RunError>("metrics.jsonl: disk full"); };
  Coordinator coordinator(options);
  ClientOptions of_rank = run.client(0);
  of_rank.endpoint = coordinator.endpoint();
  CoordinatorClient client(of_rank);
  client.record({{"kind", "step"}});
  EXPECT_TRUE(eventually([&] { return client.aborted().has_value(); }));
  expect_error<RunError>([&] { client.propose(1, 5, 10, false); }, "a record cannot be kept: metrics.jsonl: disk full");
  EXPECT_EQ(coordinator.status().first_error->rank, -1);
}

TEST(Coordinator, RecordsSentBeforeALastWordArriveInOrder) {
  constexpr int kRecords = 2000;
  Job run({1});
  CoordinatorClient client(run.client(0));
  for (int i = 0; i < kRecords; ++i) client.record({{"kind", "step"}, {"step", i}});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  client.record({{"kind", "step"}, {"loss", nan}});
  expect_error<RunError>([&] { client.record({{"loss", 1}}); }, "an object with a kind");
  client.report_error("out of luck", 3);
  run.coordinator.stop();
  ASSERT_EQ(run.records.size(), kRecords + 1U);
  for (int i = 0; i < kRecords; ++i) ASSERT_EQ(run.records[static_cast<std::size_t>(i)]["step"], i);
  EXPECT_EQ(run.records.back()["nonfinite"][0], "loss");
  EXPECT_EQ(run.coordinator.status().first_error->message, "out of luck");
}

// Being woken by stop() with nothing to read is no sign that everything has arrived.
TEST(Coordinator, StoppingLosesNothingThatIsOnItsWay) {
  std::promise<void> held, released;
  std::vector<int> steps;
  Job run({1, 1});  // the second never comes, so that there is no last word to end on
  CoordinatorOptions options = run.options({}, nullptr);
  options.sink = [&](const nlohmann::json& line) {
    steps.push_back(line["step"]);
    if (steps.size() > 1) return;
    held.set_value();
    released.get_future().wait();
  };
  Coordinator coordinator(options);
  ClientOptions of_rank = run.client(0);
  of_rank.endpoint = coordinator.endpoint();
  of_rank.heartbeat_s = kLong;  // nothing else is to be read
  CoordinatorClient client(of_rank);
  client.record({{"kind", "step"}, {"step", 1}});
  held.get_future().wait();
  const auto stopped = std::async(std::launch::async, [&] { coordinator.stop(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until the coordinator knows and has been woken
  released.set_value();
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  client.record({{"kind", "step"}, {"step", 2}});
  stopped.wait();
  EXPECT_EQ(steps, (std::vector<int>{1, 2}));
}

TEST(Coordinator, LastWordsDoNotWaitForTheDead) {
  Job run({1});
  CoordinatorClient client(run.client(0));
  run.coordinator.stop();
  client.report_error("nobody hears this", 1);  // must return: the linger time is its limit
  client.goodbye(1);
}

// A process that is stuck while the coordinator ends the run leaves by itself, with the abort's status.
TEST(CoordinatorDeathTest, AStuckRankLeavesAfterAnAbort) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto stuck = [] {
    Job run({2});
    ClientOptions options = run.client(0);
    options.exit_on_abort_s = 0.2;
    CoordinatorClient client(options);
    CoordinatorClient other(run.client(1));
    other.report_error("I give up", 1);
    std::this_thread::sleep_for(std::chrono::minutes(1));
  };
  EXPECT_EXIT(stuck(), testing::ExitedWithCode(4),
              "rank 0 \\(group 0\\) leaves: rank 1 \\(group 0\\) failed: I give up");
}

}  // namespace
}  // namespace fedshard::control
