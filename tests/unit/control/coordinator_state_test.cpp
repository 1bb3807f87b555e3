// Rounds and verdicts without sockets: the times are numbers.
#include "fedshard/control/coordinator_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "fedshard/base/error.h"
#include "tests/unit/control/expect_error.h"

namespace fedshard::control {
namespace {

using base::RunError;

TEST(RoundBook, AsksEveryRankOfEveryGroup) {
  for (const std::vector<int>& sizes : std::vector<std::vector<int>>{{1}, {3}, {1, 1}, {2, 2}, {4, 1, 2}}) {
    const Membership members(sizes);
    RoundBook book(members);
    for (std::int64_t round = 7; round < 10; ++round) {
      const int last = members.ranks() - 1;
      for (int rank = 0; rank <= last; ++rank) {
        const int group = members.group_of(rank);
        const auto plan = book.propose(rank, {round, group, 100 * (group + 1), rank == 0 && round == 9, group + 2}, 1);
        ASSERT_EQ(plan.has_value(), rank == last);
        if (!plan) continue;
        EXPECT_EQ(plan->round, round);
        EXPECT_EQ(plan->stop, round == 9);
        EXPECT_EQ(plan->participants.size(), sizes.size());
        EXPECT_EQ(plan->tokens.back(), 100 * static_cast<std::int64_t>(sizes.size()));
      }
      for (int rank = last; rank >= 0; --rank) {
        ASSERT_EQ(book.ready(rank, {round, 0}, 2).has_value(), rank == 0);
      }
      for (int rank = 0; rank <= last; ++rank) {
        const int group = members.group_of(rank);
        const bool is_first = rank == members.first_rank(group);  // all of the sum comes from one rank
        RoundMeasures measures{round * 4, {0.5, 0.5}, {}, 0.1 * rank, 0.05 * rank, 1.0};
        const auto result = book.digest(rank, {round, group, is_first ? 77U : 0U, measures}, 3);
        ASSERT_EQ(result.has_value(), rank == last);
        if (result) {
          EXPECT_EQ(result->digest, 77U);
        }
      }
      const auto record = book.record();
      EXPECT_EQ(record.round, round);
      EXPECT_EQ(record.step, round * 4);
      for (std::size_t g = 0; g < sizes.size(); ++g) EXPECT_EQ(record.steps[g], static_cast<std::int64_t>(g) + 2);
      EXPECT_EQ(record.seconds, 0.1 * last);
      EXPECT_EQ(record.exposed_seconds, 0.05 * last);
      EXPECT_EQ(record.digest, "000000000000004d");
      for (std::size_t g = 0; g < sizes.size(); ++g) EXPECT_EQ(record.drift[g], std::sqrt(sizes[g]));
      EXPECT_EQ(book.phase(), RoundBook::Phase::between);
    }
  }
}

TEST(RoundBook, DigestsAddUpModulo2To64) {
  const Membership members({2, 1});
  RoundBook book(members);
  for (const int rank : {0, 1, 2}) book.propose(rank, {1, members.group_of(rank), 1, false}, 0);
  for (const int rank : {0, 1, 2}) book.ready(rank, {1, 0}, 0);
  book.digest(0, {1, 0, ~std::uint64_t{0}, {}}, 0);
  book.digest(1, {1, 0, 6, {}}, 0);
  EXPECT_EQ(book.digest(2, {1, 1, 5, {}}, 0)->digest, 5U);
}

TEST(RoundBook, NamesTheGroupsThatDiffer) {
  const Membership members({1, 1, 1});
  RoundBook book(members);
  for (const int rank : {0, 1, 2}) book.propose(rank, {3, rank, 1, false}, 0);
  for (const int rank : {0, 1, 2}) book.ready(rank, {3, 0}, 0);
  book.digest(0, {3, 0, 9, {}}, 0);
  book.digest(1, {3, 1, 8, {}}, 0);
  expect_error<RunError>(
      [&] {
        book.digest(2, {3, 2, 9, {}}, 0);
      },
      "group 1 has 0000000000000008, group 0, 2 has 0000000000000009");
}

TEST(RoundBook, RefusesContradictions) {
  const Membership members({2, 1});
  const auto refused = [&](const auto& body, const std::string& part) {
    RoundBook book(members);
    book.propose(0, {4, 0, 10, false}, 0);
    expect_error<RunError>([&] { body(book); }, part);
  };
  refused([](RoundBook& book) { book.propose(1, {4, 0, 11, false}, 0); }, "rank 1 (group 0) counts 11 tokens");
  refused(
      [](RoundBook& book) {
        book.propose(1, {4, 0, 10, false, 3}, 0);
      },
      "counts 10 tokens in 3 steps since the last round, other ranks of its group count 10 in 0");
  refused([](RoundBook& book) { book.propose(1, {5, 0, 10, false}, 0); }, "out of step");
  refused([](RoundBook& book) { book.propose(0, {4, 0, 10, false}, 0); }, "for round 4 a second time");
  refused(
      [](RoundBook& book) {
        book.ready(1, {4, 0}, 0);
      },
      "wants to be ready for round 4 while ranks are due to propose");
  RoundBook book(members);
  for (const int rank : {0, 1}) book.propose(rank, {4, 0, 10, false}, 0);
  EXPECT_EQ(book.missing(), std::vector<int>{2});
  book.propose(2, {4, 1, 10, false}, 0);
  expect_error<RunError>([&] { book.ready(1, {4, 1}, 0); }, "ready in epoch 1, but the exchange is in epoch 0");
  for (const int rank : {0, 1, 2}) book.ready(rank, {4, 0}, 0);
  for (const int rank : {0, 1, 2}) book.digest(rank, {4, members.group_of(rank), 0, {}}, 0);
  expect_error<RunError>([&] { book.propose(0, {6, 0, 1, false}, 0); }, "proposes round 6, but round 5 is due");
}

// A coordinator's state with all ranks joined at time 0.
struct World {
  explicit World(const std::vector<int>& sizes) : state(sizes, Deadlines{}, 0) {
    ranks = std::accumulate(sizes.begin(), sizes.end(), 0);
    const Membership members(sizes);
    for (int rank = 0; rank < ranks; ++rank) {
      state.receive(rank, Hello{rank, members.group_of(rank), 1, "h", "1", "c"}, 0);
    }
    state.take_outgoing();
  }
  void beat(const std::vector<int>& who, double now, std::int64_t collective = 1, const char* name = "gather") {
    for (const int rank : who) state.receive(rank, Heartbeat{1, collective, name}, now);
  }
  // The ranks that were sent an abort since the last call; it is kept in `abort`.
  std::vector<int> aborted() {
    std::vector<int> to;
    for (const auto& [rank, message] : state.take_outgoing()) {
      if (const auto* found = std::get_if<Abort>(&message)) {
        to.push_back(rank);
        abort = *found;
      }
    }
    return to;
  }
  CoordinatorState state;
  int ranks;
  Abort abort;
};

using Ranks = std::vector<int>;

TEST(CoordinatorState, LateRanksAreNamed) {
  CoordinatorState state({2, 1}, Deadlines{}, 100);
  state.receive(1, Hello{1, 0, 1, "h", "1", "c"}, 101);
  state.receive(1, Heartbeat{}, 219);
  state.tick(219);
  EXPECT_FALSE(state.status().aborted);
  state.tick(221);
  const auto status = state.status();
  EXPECT_TRUE(status.aborted);
  EXPECT_EQ(status.first_error->rank, 0);
  EXPECT_EQ(status.first_error->status, 4);
  EXPECT_EQ(status.first_error->message.find("ranks 0, 2 did not join within 120 s; in group 0, "), 0U);
  EXPECT_EQ(status.failed, (Ranks{0, 2}));
}

TEST(CoordinatorState, ASilentRankIsNamedWithItsCollective) {
  World world({4});
  world.beat({0, 1, 2, 3}, 10, 17, "gather block.3");
  world.beat({0, 1, 3}, 39, 19, "reduce block.2");
  world.state.tick(40);
  EXPECT_FALSE(world.state.status().aborted);
  world.state.tick(41);
  EXPECT_EQ(world.aborted(), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(world.abort.status, 4);
  EXPECT_EQ(world.abort.reason,
            "rank 2 sent nothing for 30 s; in group 0, ranks 0, 1, 3 last told of collective 19 (reduce block.2) of "
            "step 1, rank 2 last told of collective 17 (gather block.3) of step 1");
  world.beat({2}, 50);  // it comes back from the dead
  EXPECT_EQ(world.state.status().rejected_frames, 1);
}

TEST(CoordinatorState, AnErrorIsPassedOnAtOnce) {
  World world({2, 2});
  world.state.receive(3, RankError{3, 1, "the loss is NaN", 1}, 5);
  EXPECT_EQ(world.aborted(), (Ranks{0, 1, 2}));
  EXPECT_EQ(world.abort.reason, "rank 3 (group 1) failed: the loss is NaN");
  EXPECT_EQ(world.abort.status, 4);  // of the others
  EXPECT_EQ(world.state.status().first_error->status, 1);
  EXPECT_EQ(world.state.status().first_error_s, 5);
  world.state.receive(2, RankError{2, 1, "later", 1}, 6);
  EXPECT_EQ(world.state.status().first_error->rank, 3);
}

TEST(CoordinatorState, AnEchoWaitsForTheCause) {
  World world({3});
  world.state.receive(0, RankError{0, 0, "connection reset", 4}, 5);
  world.state.receive(1, RankError{1, 0, "connection reset too", 4}, 5.1);
  world.state.tick(5.5);
  EXPECT_FALSE(world.state.status().aborted);
  EXPECT_EQ(world.state.status().first_error->message, "connection reset");
  world.state.receive(2, RankError{2, 0, "disk full", 1}, 6);
  EXPECT_EQ(world.state.status().first_error->message, "disk full");
  EXPECT_EQ(world.state.status().first_error->rank, 2);
}

TEST(CoordinatorState, AnEchoWithoutACauseNamesWhoFellSilent) {
  World world({3, 1});
  world.beat({0, 1, 2, 3}, 4, 8, "gather");
  world.state.receive(0, RankError{0, 0, "connection reset", 4}, 5);
  world.beat({1, 3}, 6, 9, "reduce");
  world.state.tick(7.4);
  EXPECT_FALSE(world.state.status().aborted);
  world.state.tick(7.5);
  EXPECT_EQ(world.aborted(), (Ranks{1, 3}));
  EXPECT_EQ(
      world.abort.reason.find("rank 2 fell silent; rank 0 (group 0) lost its peers: connection reset; in group 0, "),
      0U)
      << world.abort.reason;
  EXPECT_EQ(world.state.status().first_error->rank, 2);
  EXPECT_EQ(world.state.status().failed, (Ranks{0, 2}));
}

TEST(CoordinatorState, AnEchoFromAnotherGroupTellsWhereTheSilentOneWas) {
  World world({1, 1});
  world.beat({0}, 4, 8, "exchange");
  world.beat({1}, 4, 7, "gather");
  world.state.receive(0, RankError{0, 0, "timed out", 4}, 5);
  world.state.tick(7.5);
  EXPECT_TRUE(world.state.status().aborted);
  const std::string message = world.state.status().first_error->message;
  EXPECT_EQ(message.find("rank 1 fell silent; rank 0 (group 0) lost its peers: timed out; in group 0, rank 0 "), 0U);
  EXPECT_NE(message.find("; in group 1, rank 1 last told of collective 7 (gather)"), std::string::npos) << message;
}

TEST(CoordinatorState, AnEchoWhileRanksAreAbsentBlamesThem) {
  CoordinatorState state({2, 2}, Deadlines{}, 0);
  for (const int rank : {0, 2}) state.receive(rank, Hello{rank, rank / 2, 1, "a", "1", "c"}, 0);
  for (const int rank : {0, 2})
    state.receive(rank, RankError{rank, rank / 2, fmt::format("rank {}: no peer", rank), 4}, 5);
  state.tick(5);
  const CoordinatorStatus status = state.status();
  EXPECT_TRUE(status.aborted);
  EXPECT_EQ(status.first_error->rank, 1);
  EXPECT_EQ(status.first_error->message.find("ranks 1, 3 did not join; rank 0 (group 0) lost its peers: no peer; "), 0U)
      << status.first_error->message;
  EXPECT_EQ(status.failed, (Ranks{0, 1, 2, 3}));
}

TEST(CoordinatorState, AnEchoOfAllEndsAtOnce) {
  World world({2});
  for (const int rank : {0, 1}) world.state.receive(rank, RankError{rank, 0, "reset", 4}, 5);
  world.state.tick(5);
  EXPECT_TRUE(world.state.status().aborted);
  EXPECT_TRUE(world.state.is_over());
  EXPECT_EQ(world.state.status().first_error->rank, 0);
}

TEST(CoordinatorState, LateProposersAreNamed) {
  World world({1, 2});
  world.state.receive(1, Proposal{1, 1, 5, false}, 10);
  for (double now = 20; now < 611; now += 10) world.beat({0, 1, 2}, now);
  world.state.tick(609);
  EXPECT_FALSE(world.state.status().aborted);
  world.state.tick(611);
  world.aborted();
  EXPECT_EQ(world.abort.reason.find("ranks 0, 2 did not propose for round 1 within 600 s of the others"), 0U)
      << world.abort.reason;
}

TEST(CoordinatorState, WhoMayJoin) {
  const auto refused = [](int rank, const Hello& hello, const std::string& part) {
    World world({1, 2});
    world.state.receive(rank, hello, 1);
    world.aborted();
    EXPECT_NE(world.abort.reason.find(part), std::string::npos) << world.abort.reason;
    EXPECT_EQ(world.abort.status, 2);
    EXPECT_EQ(world.state.status().first_error->status, 2);
  };
  refused(1, {1, 1, 77, "other", "1", "c"}, "rank 1 (group 1) joined twice, now as process 77 on other");
  const auto second = [](const Hello& hello, const std::string& part) {
    CoordinatorState state({1, 2}, Deadlines{}, 0);
    state.receive(0, Hello{0, 0, 1, "a", "1", "c"}, 0);
    state.receive(1, hello, 0);
    EXPECT_NE(state.status().first_error->message.find(part), std::string::npos);
    state.receive(2, Hello{2, 1, 1, "b", "1", "c"}, 0);  // too late: it learns at once that the run is over
    EXPECT_TRUE(std::holds_alternative<Abort>(state.take_outgoing().back().second));
  };
  second({1, 1, 1, "b", "2", "c"}, "rank 1 (group 1) on b runs version 2, rank 0 on a runs 1");
  second({1, 1, 1, "b", "1", "d"}, "rank 1 (group 1) on b has another configuration than rank 0 on a");
  second({1, 0, 1, "b", "1", "c"}, "rank 1 takes itself for rank 1 (group 0): the ranks were started with different");
}

TEST(CoordinatorState, WhoMaySpeak) {
  World world({2});
  CoordinatorState empty({2}, Deadlines{}, 0);
  empty.receive(0, Heartbeat{}, 0);
  EXPECT_EQ(empty.status().last_rejection, "rank 0 (group 0) spoke while it is expected");
  world.state.receive(2, Heartbeat{}, 0);
  world.state.receive(-1, Heartbeat{}, 0);
  EXPECT_EQ(world.state.status().last_rejection, "rank -1 is not one of the 2 of this run");
  world.state.receive(0, Commit{}, 0);
  EXPECT_EQ(world.state.status().last_rejection, "rank 0 (group 0) sent a commit, which only the coordinator may");
  world.state.receive(0, RankError{1, 0, "it was him", 1}, 0);
  EXPECT_EQ(world.state.status().last_rejection, "rank 0 (group 0) reports an error of rank 1");
  EXPECT_EQ(world.state.status().rejected_frames, 4);
  EXPECT_FALSE(world.state.status().aborted);
}

TEST(CoordinatorState, GoodbyesAreRemembered) {
  World world({1, 1});
  world.state.receive(0, Goodbye{0}, 1);
  world.state.tick(1000 - 1);  // the ended one may be silent, the other not
  EXPECT_EQ(world.state.status().first_error->rank, 1);
  EXPECT_EQ(world.state.status().ended, Ranks{0});

  World stops({1, 1});
  for (const int rank : {0, 1}) stops.state.receive(rank, Goodbye{5}, 1);
  EXPECT_TRUE(stops.state.is_over());
  EXPECT_FALSE(stops.state.status().first_error);

  World fails({1, 1});
  fails.state.receive(0, Goodbye{3}, 1);
  EXPECT_EQ(fails.state.status().first_error->status, 3);
}

TEST(CoordinatorState, ARoundNeedsWhoHasEnded) {
  World before({1, 1});
  before.state.receive(0, Goodbye{0}, 1);
  before.state.receive(1, Proposal{1, 1, 5, false}, 2);
  before.aborted();
  EXPECT_EQ(before.abort.reason, "rank 1 (group 1) proposes round 1, but rank 0 has already ended");
  World during({1, 1});
  during.state.receive(1, Proposal{1, 1, 5, false}, 1);
  during.state.receive(0, Goodbye{0}, 2);
  EXPECT_EQ(during.aborted(), Ranks{1});
  EXPECT_EQ(during.abort.reason, "rank 0 (group 0) ended in the middle of round 1");
}

TEST(CoordinatorState, RecordsGetTheirTimeAndRoundsTheirRate) {
  CoordinatorState state({1, 1}, Deadlines{}, 100);
  for (const int rank : {0, 1}) state.receive(rank, Hello{rank, rank, 1, "h", "1", "c"}, 100);
  state.receive(1, Record{{{"kind", "step"}, {"step", 1}, {"time_s", -1}}}, 102);
  EXPECT_EQ(state.take_records().front().dump(), R"({"kind":"step","step":1,"time_s":2.0})");
  EXPECT_TRUE(state.status().latest_step[0].is_null());
  EXPECT_EQ(state.status().latest_step[1]["step"], 1);
  for (const int rank : {0, 1}) state.receive(rank, Proposal{1, rank, 300, false}, 103);
  for (const int rank : {0, 1}) state.receive(rank, Ready{1, 0}, 104);
  RoundMeasures measures{8, {0.5, 0.5}, {1}, 0.5, 0.25, std::numeric_limits<double>::quiet_NaN()};
  for (const int rank : {0, 1}) state.receive(rank, Digest{1, rank, 5, measures}, 105);
  const auto record = state.take_records().front();
  EXPECT_EQ(record["kind"], "round");
  EXPECT_EQ(record["time_s"], 5.0);
  EXPECT_EQ(record["tokens_per_s"], 200.0);  // 600 tokens since the first sign of training, at 102
  EXPECT_EQ(record["weights"], (std::vector<double>{0.5, 0.5}));
  EXPECT_EQ(record["left_out"], std::vector<int>{1});
  EXPECT_TRUE(record["drift"][0].is_null());
  EXPECT_EQ(record["nonfinite"][0], "drift");
  EXPECT_EQ(state.status().rounds, 1);
}

}  // namespace
}  // namespace fedshard::control
