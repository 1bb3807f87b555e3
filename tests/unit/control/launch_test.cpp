// Local launches of /bin/sh: every way in which ranks can end.
#include "fedshard/control/launch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"
#include "fedshard/control/membership.h"
#include "tests/unit/control/expect_error.h"

namespace fedshard::control {
namespace {

namespace fs = std::filesystem;

class Launch : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / fmt::format("fedshard-launch-{}", ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override {
    // Nothing may be left: neither children nor what they have started (they write their numbers down).
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().extension() != ".pid") continue;
      const std::string text = base::read_file(entry.path());
      if (text.empty()) continue;  // its shell was killed while it wrote
      const int pid = std::stoi(text);
      bool gone = false;
      for (int i = 0; i < 500 && !gone; ++i) {  // a grandchild is reaped by init, in init's own time
        gone = ::kill(pid, 0) != 0 || is_zombie(pid);
        if (!gone) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      EXPECT_TRUE(gone) << "process " << pid << " is left";
    }
    fs::remove_all(folder_);
  }
  static bool is_zombie(int pid) {
    std::ifstream stat(fmt::format("/proc/{}/stat", pid));
    std::string text{std::istreambuf_iterator<char>(stat), {}};
    const auto end = text.rfind(')');
    return end == std::string::npos || text.substr(end + 2, 1) == "Z" || text.substr(end + 2, 1) == "X";
  }

  LocalLaunch launch(const std::string& script, std::vector<int> group_sizes) const {
    LocalLaunch l;
    l.program = "/bin/sh";
    l.arguments = {"-c", script};
    l.group_sizes = std::move(group_sizes);
    l.output_folder = folder_ / "ranks";
    l.environment = {{"DIR", folder_.string()}};
    l.master_port = 4711;
    l.grace_s = 0.5;
    l.cause_wait_s = 0.5;
    return l;
  }
  LaunchResult run(const std::string& script, std::vector<int> group_sizes) const {
    return run_local(launch(script, std::move(group_sizes)));
  }
  std::string content(const std::string& name) const { return base::read_file(folder_ / name); }

  fs::path folder_;
};

constexpr const char* kWait = "echo $$ > $DIR/$RANK.pid; sleep 600 & echo $! > $DIR/sleep$RANK.pid; wait";

TEST_F(Launch, EveryRankKnowsItsPlace) {
  LocalLaunch l = launch(
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $FEDSHARD_COORDINATOR "
      "$FEDSHARD_RUN_TOKEN $EXTRA \"$@\" > $DIR/$RANK; echo $PPID = $FEDSHARD_LAUNCHER_PID >&2; cat >> $DIR/$RANK",
      {1, 2});
  l.arguments.insert(l.arguments.end(), {"sh", "train", "a config.toml"});
  l.environment["EXTRA"] = "more";
  l.environment["RANK"] = "the launcher's own win";
  l.coordinator = "tcp://c";
  l.run_token = "secret";
  const auto result = run_local(l);
  EXPECT_EQ(result.status, 0) << result.message;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(content(std::to_string(rank)),
              fmt::format("{0} {0} 3 3 127.0.0.1 4711 tcp://c secret more train a config.toml\n", rank));
    EXPECT_EQ(content(fmt::format("ranks/rank{}.err", rank)), fmt::format("{0} = {0}\n", ::getpid()));
  }
}

TEST_F(Launch, OneRank) { EXPECT_EQ(run("exit 0", {1}).status, 0); }

TEST_F(Launch, AStatusIsPassedOnWithTheRanksWords) {
  const auto result =
      run(fmt::format("if [ $RANK = 2 ]; then echo one >&2; echo two >&2; exit 3; fi; {}", kWait), {2, 2});
  EXPECT_EQ(result.status, 3);
  EXPECT_EQ(result.rank, 2);
  EXPECT_EQ(result.message, "rank 2 (group 1) ended with status 3: one\ntwo");
}

TEST_F(Launch, ARankWithoutWords) {
  EXPECT_EQ(run("exit 1", {1}).message, "rank 0 (group 0) ended with status 1: it said nothing about the reason");
}

TEST_F(Launch, OnlyTheLastLinesAreTold) {
  const auto result = run("i=0; while [ $i -lt 3000 ]; do echo line $i >&2; i=$((i + 1)); done; exit 1", {1});
  EXPECT_EQ(std::count(result.message.begin(), result.message.end(), '\n'), 19);
  EXPECT_NE(result.message.find(": line 2980\n"), std::string::npos) << result.message;
}

TEST_F(Launch, AKilledRankIsNamedWithItsSignal) {
  const auto result = run(fmt::format("if [ $RANK = 1 ]; then kill -9 $$; fi; {}", kWait), {2, 1});
  EXPECT_EQ(result.status, 4);
  EXPECT_EQ(result.rank, 1);
  EXPECT_EQ(result.message,
            "rank 1 (group 0) was killed by SIGKILL (if nobody did that, the machine ran out of memory)");
}

TEST_F(Launch, AProcessOfVirtualGroupsIsNamedWithAllItsRanks) {
  const auto run_virtually = [&](const std::string& script, std::optional<RankError> report) {
    LocalLaunch l = launch(
        fmt::format("[ $WORLD_SIZE = 2 ] || exit 9; if [ $RANK = 1 ]; then {}; fi; {}", script, kWait), {2, 2, 2});
    l.virtual_groups = 3;
    l.reported_error = [report] { return report; };
    return run_local(l);
  };
  const auto killed = run_virtually("kill -9 $$", RankError{3, 1, "its peers are gone", 4});
  EXPECT_EQ(killed.status, 4);
  EXPECT_EQ(killed.message.find("process 1 (ranks 1, 3, 5, one of each group) was killed by SIGKILL"), 0U)
      << killed.message;
  EXPECT_EQ(run_virtually("echo why >&2; exit 1", std::nullopt).message,
            "process 1 (ranks 1, 3, 5, one of each group) ended with status 1: why");
  // One of its ranks has said why; one of the other process's has said what this was the echo of.
  EXPECT_EQ(run_virtually("exit 1", RankError{3, 1, "rank 3: disk full", 1}).message,
            "rank 3 (group 1) ended with status 1: disk full");
  EXPECT_EQ(run_virtually("exit 4", RankError{4, 2, "disk full", 1}).message, "rank 4 (group 2): disk full");
}

TEST_F(Launch, AnEchoDoesNotHideTheKilledRank) {
  // Rank 0 leaves with status 4 well before rank 1 dies.
  const auto result = run(
      fmt::format("case $RANK in 0) echo peers >&2; exit 4;; 1) sleep 0.2; kill -SEGV $$;; *) {};; esac", kWait), {3});
  EXPECT_EQ(result.status, 4);
  EXPECT_EQ(result.message, "rank 1 (group 0) was killed by SIGSEGV");
}

TEST_F(Launch, AnEchoDoesNotHideTheFailedRank) {
  const auto result = run("case $RANK in 1) sleep 0.2; echo why >&2; exit 1;; *) exit 4;; esac", {3});
  EXPECT_EQ(result.status, 1);
  EXPECT_EQ(result.message, "rank 1 (group 0) ended with status 1: why");
}

TEST_F(Launch, LostPeersWithoutACause) {
  const auto result = run(fmt::format("if [ $RANK = 1 ]; then echo reset >&2; exit 4; fi; {}", kWait), {2});
  EXPECT_EQ(result.status, 4);
  EXPECT_EQ(result.message, "rank 1 (group 0) ended with status 4: reset");
}

TEST_F(Launch, TheCoordinatorsReportOutranksEchoes) {
  LocalLaunch l = launch("if [ $RANK = 0 ]; then exit 4; fi; exit 0", {1, 1});
  l.reported_error = [] { return RankError{1, 1, "sent nothing for 30 s", 4}; };
  EXPECT_EQ(run_local(l).message, "rank 1 (group 1): sent nothing for 30 s");
  l.reported_error = [] { return RankError{-1, -1, "the groups differ", 1}; };
  EXPECT_EQ(run_local(l).message, "the groups differ");
  EXPECT_EQ(run_local(l).status, 1);
}

TEST_F(Launch, AnEarlierReportOutranksACrashButNotAKill) {
  LocalLaunch l = launch(fmt::format("if [ $RANK = 0 ]; then kill -$SIGNAL $$; fi; {}", kWait), {1, 1});
  l.reported_error = [] { return RankError{1, 1, "disk full", 1}; };
  l.environment["SIGNAL"] = "ABRT";
  EXPECT_EQ(run_local(l).message, "rank 1 (group 1): disk full");
  l.environment["SIGNAL"] = "KILL";
  EXPECT_EQ(run_local(l).message.find("rank 0 (group 0) was killed by SIGKILL"), 0U);
  l.reported_error = [] { return RankError{0, 0, "its own words", 1}; };
  EXPECT_NE(run_local(l).message.find("): its own words"), std::string::npos);
}

TEST_F(Launch, RanksThatIgnoreSigtermAreKilled) {
  const auto result = run(
      fmt::format("trap '' TERM; if [ $RANK = 0 ]; then while [ ! -f $DIR/1.pid ]; do sleep 0.05; done; exit 2; fi; {}",
                  "echo $$ > $DIR/$RANK.pid; while true; do sleep 1; done"),
      {2});
  EXPECT_EQ(result.status, 2);
  EXPECT_EQ(result.rank, 0);
}

TEST_F(Launch, StoppedRanksAreKilledToo) {
  const auto result = run("if [ $RANK = 0 ]; then sleep 0.2; exit 2; fi; echo $$ > $DIR/1.pid; kill -STOP $$", {2});
  EXPECT_EQ(result.status, 2);
}

TEST_F(Launch, WhatRanksLeaveBehindIsKilled) {
  EXPECT_EQ(run("sleep 600 & echo $! > $DIR/sleep$RANK.pid; exit 0", {2}).status, 0);
}

TEST_F(Launch, StoppedIsNoFailure) {
  EXPECT_EQ(run("if [ $RANK = 0 ]; then exit 5; fi; sleep 0.3; echo done > $DIR/late; exit 5", {2}).status, 5);
  EXPECT_EQ(content("late"), "done\n");  // the first 5 did not end the other rank
  EXPECT_EQ(run("exit $((RANK * 5))", {2}).status, 5);
  EXPECT_EQ(run("if [ $RANK = 0 ]; then exit 5; fi; exit 1", {2}).status, 1);
}

// Signals the launcher when all ranks have written their number.
std::function<void()> signal_when_ready(const fs::path& folder, int ranks, std::vector<int> signals) {
  return [=, sent = false]() mutable {
    for (int rank = 0; rank < ranks; ++rank) {
      if (!fs::exists(folder / fmt::format("{}.ready", rank))) return;
    }
    if (sent) return;
    sent = true;
    for (const int signal : signals) ::kill(::getpid(), signal);
  };
}

TEST_F(Launch, SignalsArePassedOn) {
  LocalLaunch l = launch(
      "trap 'echo stopped > $DIR/$RANK; exit 5' INT TERM; echo $$ > $DIR/$RANK.pid; : > $DIR/$RANK.ready; "
      "while true; do sleep 0.05; done",
      {2});
  for (const int signal : {SIGINT, SIGTERM}) {
    for (const char* old : {"0", "1", "0.ready", "1.ready"}) fs::remove(folder_ / old);
    l.on_idle = signal_when_ready(folder_, 2, {signal});
    EXPECT_EQ(run_local(l).status, 5);
    EXPECT_EQ(content("0") + content("1"), "stopped\nstopped\n");
  }
}

TEST_F(Launch, ASignalThatKillsTheRanksIsTold) {
  LocalLaunch l = launch(std::string(": > $DIR/$RANK.ready; ") + kWait, {2});
  l.on_idle = signal_when_ready(folder_, 2, {SIGINT});
  const auto result = run_local(l);
  EXPECT_EQ(result.status, 128 + SIGINT);
  EXPECT_EQ(result.message, "stopped by SIGINT");
}

TEST_F(Launch, ASecondSignalDoesNotWait) {
  LocalLaunch l =
      launch("trap '' INT TERM; echo $$ > $DIR/$RANK.pid; : > $DIR/$RANK.ready; while true; do sleep 0.05; done", {2});
  l.stop_grace_s = 3600;
  int looks = 0;
  auto first = signal_when_ready(folder_, 2, {SIGTERM});
  l.on_idle = [&] {
    first();
    if (fs::exists(folder_ / "0.ready") && fs::exists(folder_ / "1.ready") && ++looks == 5) ::kill(::getpid(), SIGINT);
  };
  EXPECT_EQ(run_local(l).status, 128 + SIGTERM);
}

TEST_F(Launch, ItsSignalHandlersAreGoneAfterwards) {
  struct sigaction before {
  }, after{};
  ::sigaction(SIGINT, nullptr, &before);
  run("exit 0", {1});
  ::sigaction(SIGINT, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

TEST_F(Launch, ItWorksWhereSigchldIsIgnored) {
  ::signal(SIGCHLD, SIG_IGN);
  EXPECT_EQ(run("exit 3", {2}).status, 3);
  EXPECT_EQ(::signal(SIGCHLD, SIG_DFL), SIG_IGN);
}

TEST_F(Launch, AnExceptionLeavesNoRankBehind) {
  LocalLaunch l = launch(std::string(": > $DIR/$RANK.ready; trap '' TERM; ") + kWait, {2});
  l.on_idle = [&] {
    if (fs::exists(folder_ / "0.ready") && fs::exists(folder_ / "1.ready")) throw base::RunError("no more display");
  };
  expect_error<base::RunError>([&] { run_local(l); }, "no more display");
  EXPECT_EQ(run("exit 0", {1}).status, 0);  // and another launch may follow
}

TEST_F(Launch, WhatCannotBeStartedIsNamed) {
  LocalLaunch l = launch("", {1});
  l.program = "/no/such/program";
  expect_error<base::RunError>([&] { run_local(l); }, "cannot start rank 0 (/no/such/program");
  l = launch("", {1});
  std::ofstream(folder_ / "file").close();
  l.output_folder = folder_ / "file" / "ranks";
  expect_error<base::RunError>([&] { run_local(l); }, "cannot create");
}

// A parent that dies takes a child along that has asked for it. The pipe ends when the child is gone.
TEST_F(Launch, RanksDieWithTheirLauncher) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    ::setenv("FEDSHARD_LAUNCHER_PID", std::to_string(::getpid()).c_str(), 1);
    if (::fork() == 0) {
      die_with_parent();
      ::close(ends[0]);
      [[maybe_unused]] const auto n = ::write(ends[1], "x", 1);
      while (true) ::pause();
    }
    char ready = 0;
    [[maybe_unused]] const auto n = ::read(ends[0], &ready, 1);
    ::_exit(0);
  }
  ::close(ends[1]);
  ::waitpid(parent, nullptr, 0);
  char end = 0;
  EXPECT_EQ(::read(ends[0], &end, 1), 0);
  ::close(ends[0]);
}

TEST_F(Launch, DyingWithTheParentIsForOurRanksOnly) {
  ::unsetenv("FEDSHARD_LAUNCHER_PID");
  die_with_parent();
  ::setenv("FEDSHARD_LAUNCHER_PID", "1", 1);
  const bool child_of_init = ::getppid() == 1;
  if (!child_of_init) expect_error<base::PeersLostError>([] { die_with_parent(); }, "the launcher (process 1)");
  ::unsetenv("FEDSHARD_LAUNCHER_PID");
}

}  // namespace
}  // namespace fedshard::control
