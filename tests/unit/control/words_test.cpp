// Run tokens, messages, membership and ports.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <random>

#include "fedshard/base/error.h"
#include "fedshard/control/membership.h"
#include "fedshard/control/messages.h"
#include "fedshard/control/ports.h"
#include "fedshard/control/run_token.h"
#include "tests/unit/control/expect_error.h"

namespace fedshard::control {
namespace {

using base::RunError;
using base::UsageError;

TEST(RunToken, ComesBackFromItsText) {
  const RunToken token = RunToken::random();
  const RunToken copy = RunToken::parse(token.format());
  EXPECT_EQ(token.format().size(), 80U);
  EXPECT_EQ(copy.format(), token.format());
  EXPECT_EQ(copy.server_public(), token.server_public());
  EXPECT_EQ(copy.client_public(), token.client_public());
  EXPECT_NE(token.client_secret(), token.server_secret());
  EXPECT_NE(RunToken::random().format(), token.format());
}

TEST(RunToken, RefusesWhatIsNone) {
  const std::string text = RunToken::random().format();
  expect_error<UsageError>([] { RunToken::parse(""); }, "has 0 characters, not 80");
  expect_error<UsageError>([&] { RunToken::parse(text.substr(1)); }, "has 79 characters, not 80");
  expect_error<UsageError>([&] { RunToken::parse(text + "x"); }, "has 81 characters");
  for (const std::size_t position : {0U, 40U, 79U}) {
    std::string bad = text;
    bad[position] = '"';  // not in Z85's alphabet
    expect_error<UsageError>([&] { RunToken::parse(bad); }, "is not valid");
  }
}

// What went through encode() and decode().
template <class M>
M through(const M& message) {
  std::string why;
  const auto back = decode(encode(message), why);
  if (!back) throw std::runtime_error(why);
  return std::get<M>(*back);
}

TEST(Messages, ComeBackAsTheyWere) {
  const auto hello = through(Hello{3, 1, 4711, "node", "1.0", "abc"});
  EXPECT_EQ(hello.rank, 3);
  EXPECT_EQ(hello.group, 1);
  EXPECT_EQ(hello.pid, 4711);
  EXPECT_EQ(hello.host + hello.version + hello.config_digest, "node1.0abc");
  EXPECT_EQ(through(Heartbeat{7, 99, "gather block.3"}).collective_name, "gather block.3");
  EXPECT_EQ(through(Record{{{"kind", "step"}, {"loss", 0.1}}}).line["loss"], 0.1);
  const auto proposal = through(Proposal{5, 1, std::int64_t{1} << 60, true, 7});
  EXPECT_TRUE(proposal.wants_stop);
  EXPECT_EQ(proposal.tokens, std::int64_t{1} << 60);
  EXPECT_EQ(proposal.steps, 7);
  EXPECT_EQ(through(Ready{5, 2}).epoch, 2);
  EXPECT_EQ(through(RankError{-1, -1, "why", 3}).message, "why");
  EXPECT_EQ(through(Goodbye{5}).status, 5);
  through(Welcome{});
  through(Alive{});
  const auto plan = through(RoundPlan{5, 2, {0, 2}, {10, 20}, true, {3, 1}});
  EXPECT_EQ(plan.participants, (std::vector<int>{0, 2}));
  EXPECT_EQ(plan.tokens, (std::vector<std::int64_t>{10, 20}));
  EXPECT_TRUE(plan.stop);
  EXPECT_EQ(plan.steps, (std::vector<std::int64_t>{3, 1}));
  EXPECT_THROW(through(RoundPlan{5, 2, {0, 2}, {10, 20}, true, {3}}), std::runtime_error);
  EXPECT_EQ(through(Commit{5, 2, {1}}).participants, std::vector<int>{1});
  EXPECT_EQ(through(Abort{"because", 1}).reason, "because");
}

TEST(Messages, KeepAllBitsOfADigestAndSayNaN) {
  for (const std::uint64_t bits : {std::uint64_t{0}, std::uint64_t{1} << 63, ~std::uint64_t{0}}) {
    EXPECT_EQ(through(DigestResult{1, bits}).digest, bits);
    EXPECT_EQ(through(Digest{1, 0, bits, {}}).sum, bits);
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  RoundMeasures given{8, {0.25, 0.75}, {0}, 0.1, 0.2, nan, 3, 0.5, nan, 0.75};
  given.traffic = {0, 0, 1, 2, 3, 4, 5, 6, 7, std::int64_t{1} << 53};
  const auto measures = through(Digest{1, 0, 2, given}).measures;
  EXPECT_EQ(measures.traffic, given.traffic);
  EXPECT_EQ(measures.fragment, 3);
  EXPECT_EQ(measures.change_square, 0.5);
  EXPECT_TRUE(std::isnan(measures.change_with_mean));
  EXPECT_EQ(measures.mean_change_square, 0.75);
  EXPECT_EQ(measures.step, 8);
  EXPECT_EQ(measures.weights, (std::vector<double>{0.25, 0.75}));
  EXPECT_EQ(measures.left_out, std::vector<int>{0});
  EXPECT_EQ(measures.seconds, 0.1);
  EXPECT_EQ(measures.exposed_seconds, 0.2);
  EXPECT_TRUE(std::isnan(measures.drift_square));
}

TEST(Messages, TextThatIsNotUtf8IsSentAllTheSame) {
  EXPECT_EQ(through(Abort{"file \xff", 1}).reason, "file \xef\xbf\xbd");
}

TEST(Messages, FramesHaveALimit) {
  expect_error<RunError>([] { encode(Abort{std::string(kMaxFrameBytes, 'x'), 1}); }, "type abort");
  std::string why;
  EXPECT_FALSE(decode(std::string(kMaxFrameBytes + 1, ' '), why));
  EXPECT_EQ(why, "1048577 bytes are too long");
}

TEST(Messages, MalformedFramesAreNothing) {
  const auto refused = [](const std::string& frame, const std::string& part) {
    std::string why;
    EXPECT_FALSE(decode(frame, why)) << frame;
    EXPECT_NE(why.find(part), std::string::npos) << why;
  };
  refused("", "parse error");
  refused("{", "parse error");
  refused("\xff\xfe", "parse error");
  refused("[]", "not an object");
  refused("{}", "'v' is missing");
  refused(R"({"v":2,"type":"welcome"})", "protocol version 2");
  refused(R"({"v":true,"type":"welcome"})", "'v' is not an integer");
  refused(R"({"v":1})", "'type' is missing");
  refused(R"({"v":1,"type":7})", "'type' is not a string");
  refused(R"({"v":1,"type":"greeting"})", "unknown type 'greeting'");
  refused(R"({"v":1,"type":"ready","round":1})", "'epoch' is missing");
  refused(R"({"v":1,"type":"ready","round":1.5,"epoch":0})", "'round' is not an integer");
  refused(R"({"v":1,"type":"ready","round":-1,"epoch":0})", "'round' is out of range");
  refused(R"({"v":1,"type":"ready","round":18446744073709551615,"epoch":0})", "'round' is out of range");
  refused(R"({"v":1,"type":"proposal","round":1,"group":4294967296,"tokens":1,"wants_stop":false})", "'group' is out");
  refused(R"({"v":1,"type":"proposal","round":1,"group":0,"tokens":1,"wants_stop":0})", "'wants_stop' is not true");
  refused(R"({"v":1,"type":"digest_result","round":1,"digest":-1})", "'digest' is not an unsigned");
  refused(R"({"v":1,"type":"goodbye","status":256})", "'status' is out of range");
  refused(R"({"v":1,"type":"record","line":[]})", "'line' is not an object");
  refused(R"({"v":1,"type":"record","line":{}})", "'kind' is missing");
  refused(R"({"v":1,"type":"commit","round":1,"epoch":0,"participants":3})", "'participants' is not a list");
  refused(R"({"v":1,"type":"round_plan","round":1,"epoch":0,"participants":[0],"tokens":[],"stop":false,"steps":[1]})",
          "differ");
}

TEST(Messages, DeepNestingIsRefused) {
  const auto record = [](std::size_t depth) {
    return R"({"v":1,"type":"record","line":{"kind":"step","x":)" + std::string(depth, '[') + std::string(depth, ']') +
           "}}";
  };
  std::string why;
  EXPECT_TRUE(decode(record(31), why)) << why;
  for (const std::size_t depth : {std::size_t{32}, kMaxFrameBytes / 2 - 100}) {
    EXPECT_FALSE(decode(record(depth), why)) << depth;
    EXPECT_EQ(why, "nested more than 32 deep");
  }
}

TEST(Messages, DamagedFramesNeverThrow) {
  const std::string good = encode(Digest{1, 0, 2, {8, {0.25, 0.75}, {}, 0.1, 0.2, 0.3}});
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string frame = good;
    for (unsigned changes = random() % 4 + 1; changes > 0; --changes) {
      frame[random() % frame.size()] = static_cast<char>(random());
    }
    frame.resize(frame.size() - random() % 3);
    std::string why;
    if (!decode(frame, why)) {
      ++refused;
      EXPECT_FALSE(why.empty());
    }
  }
  EXPECT_GT(refused, 15000);
}

TEST(Membership, KnowsTheLegalMoves) {
  using enum RankState;
  const std::vector<std::pair<RankState, RankState>> legal{{expected, joined}, {expected, failed}, {joined, training},
                                                           {joined, failed},   {joined, ended},    {training, failed},
                                                           {training, ended}};
  for (const RankState from : {expected, joined, training, failed, ended}) {
    for (const RankState to : {expected, joined, training, failed, ended}) {
      EXPECT_EQ(is_legal(from, to), std::find(legal.begin(), legal.end(), std::pair(from, to)) != legal.end())
          << name_of(from) << " to " << name_of(to);
    }
  }
}

TEST(Membership, CountsRanksGroupByGroup) {
  Membership members({1, 3, 2});
  EXPECT_EQ(members.ranks(), 6);
  EXPECT_EQ(members.groups(), 3);
  EXPECT_EQ(members.group_of(0), 0);
  EXPECT_EQ(members.group_of(3), 1);
  EXPECT_EQ(members.group_of(5), 2);
  EXPECT_EQ(members.first_rank(1), 1);
  EXPECT_EQ(members.first_rank(2), 4);
  members.move(4, RankState::joined);
  EXPECT_EQ(members.in_state(RankState::joined), std::vector<int>{4});
  EXPECT_FALSE(members.is_over());
  members.move(4, RankState::ended);
  for (const int rank : {0, 1, 2, 3, 5}) members.move(rank, RankState::failed);
  EXPECT_TRUE(members.is_over());
  expect_error<RunError>([&] { members.move(4, RankState::training); }, "rank 4 (group 2) cannot go from ended to");
  expect_error<UsageError>([] { Membership({}); }, "at least one group");
  expect_error<UsageError>([] { Membership({2, 0}); }, "group 1 has 0 ranks");
}

TEST(Membership, ListsRanksShortly) {
  EXPECT_EQ(list_ranks({}), "no rank");
  EXPECT_EQ(list_ranks({5}), "rank 5");
  EXPECT_EQ(list_ranks({5, 6}), "ranks 5, 6");
  EXPECT_EQ(list_ranks({0, 1, 2, 5, 7, 8, 9, 10}), "ranks 0-2, 5, 7-10");
}

TEST(Ports, ABoundPortIsTakenAndAFreeOneIsChosen) {
  ListeningSocket first = listen_on("127.0.0.1", 0);
  EXPECT_GT(first.port(), 0);
  const std::string taken = fmt::format("port {} of 127.0.0.1 is in use", first.port());
  expect_error<UsageError>([&] { listen_on("127.0.0.1", first.port()); }, taken);
  ListeningSocket second = listen_on("127.0.0.1", 0);
  EXPECT_NE(second.port(), first.port());
  const int port = first.port();
  const int fd = first.release();
  expect_error<UsageError>([&] { listen_on("127.0.0.1", port); }, taken);
  ::close(fd);
  EXPECT_EQ(listen_on("127.0.0.1", port).port(), port);
}

TEST(Ports, RefusesAddressesOfOthers) {
  expect_error<UsageError>([] { listen_on("192.0.2.1", 0); }, "cannot listen on 192.0.2.1:0");
  expect_error<UsageError>([] { listen_on("no-such-host.invalid", 0); }, "'no-such-host.invalid'");
  expect_error<UsageError>([] { listen_on("127.0.0.1", 65536); }, "65536 is not a port");
}

}  // namespace
}  // namespace fedshard::control
