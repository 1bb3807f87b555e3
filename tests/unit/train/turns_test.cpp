#include "fedshard/train/turns.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

namespace fedshard::train {
namespace {

constexpr int kTurns = 50;

// A thread for each member.
void on_members(int members, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int member = 0; member < members; ++member) threads.emplace_back([&body, member] { body(member); });
}

TEST(Turns, GoRoundOneAtATimeAndThenMeet) {
  for (const int members : {1, 2, 3, 7}) {
    Turns turns(members);
    std::vector<int> order;  // guarded by the turns alone, as the thread sanitizer would see
    std::atomic<int> had{0}, left_early{0};
    on_members(members, [&](int member) {
      for (int turn = 1; turn <= kTurns; ++turn) {
        turns.run(member, [&] {
          order.push_back(member);
          ++had;
        });
        left_early += had < turn * members;
      }
    });
    ASSERT_EQ(std::ssize(order), members * kTurns);
    for (int i = 0; i < members * kTurns; ++i) ASSERT_EQ(order[i], i % members);
    EXPECT_EQ(left_early, 0);
  }
}

// Members that have fewer turns before a meeting wait there, and the others go round without them.
TEST(Turns, MembersMayHaveUnlikeNumbersOfThem) {
  const std::vector<int> had{3, 1, 0, 2};
  Turns turns(4);
  std::vector<int> order;  // guarded by the turns alone
  std::atomic<int> met{0}, met_early{0};
  on_members(4, [&](int member) {
    for (int meeting = 1; meeting <= kTurns; ++meeting) {
      for (int turn = 0; turn < had[member]; ++turn) turns.run(member, [&] { order.push_back(member); });
      ++met;
      turns.meet(member);
      met_early += met < 4 * meeting;
    }
    turns.run(member, [&] { order.push_back(10 + member); });
  });
  std::vector<int> expected;
  for (int meeting = 0; meeting < kTurns; ++meeting) expected.insert(expected.end(), {0, 1, 3, 0, 3, 0});
  expected.insert(expected.end(), {10, 11, 12, 13});
  EXPECT_EQ(order, expected);
  EXPECT_EQ(met_early, 0);
  Turns alone(1);
  alone.meet(0);
  alone.run(0, [] {});
}

// Each group's ranks wait for one another in their turns, and all ranks of the world between them.
TEST(Turns, OfSeveralProcessesDoNotDeadlock) {
  constexpr int kProcesses = 3, kGroups = 4;
  std::vector<std::unique_ptr<Turns>> turns;
  std::vector<std::unique_ptr<std::barrier<>>> groups;
  for (int p = 0; p < kProcesses; ++p) turns.push_back(std::make_unique<Turns>(kGroups));
  for (int g = 0; g < kGroups; ++g) groups.push_back(std::make_unique<std::barrier<>>(kProcesses));
  std::barrier world(kProcesses * kGroups);
  std::array<int, kGroups> collectives{};  // of each group, counted by its rank in process 0
  on_members(kProcesses * kGroups, [&](int rank) {
    const int process = rank % kProcesses, group = rank / kProcesses;
    for (int turn = 1; turn <= kTurns; ++turn) {
      turns[process]->run(group, [&] {
        for (int i = 0; i < 3; ++i) groups[group]->arrive_and_wait();
        if (process == 0) collectives[group] += 3;
      });
      if (turn % 5 != 0) continue;
      if (turn % 10 == 0) {  // some have more to do before they all meet
        for (int i = 0; i < group; ++i) {
          turns[process]->run(group, [&] { groups[group]->arrive_and_wait(); });
        }
        turns[process]->meet(group);
      }
      world.arrive_and_wait();
    }
  });
  for (const int count : collectives) EXPECT_EQ(count, 3 * kTurns);
}

TEST(Turns, AnExceptionWakesTheOthers) {
  for (const int culprit : {0, 1, 2}) {
    Turns turns(3);
    std::atomic<int> closed{0};
    std::string error;
    on_members(3, [&](int member) {
      try {
        for (int turn = 1; turn <= kTurns; ++turn) {
          turns.run(member, [&] {
            if (member == culprit && turn == 2) throw std::runtime_error("out of memory");
          });
        }
      } catch (const Turns::Closed&) {
        ++closed;
      } catch (const std::runtime_error& e) {
        error = e.what();
      }
    });
    EXPECT_EQ(closed, 2);
    EXPECT_EQ(error, "out of memory");
  }
}

TEST(Turns, ClosingWakesWhoWaits) {
  Turns turns(2);
  std::jthread waits([&] { EXPECT_THROW(turns.run(0, [] {}), Turns::Closed); });  // for member 1, which never comes
  turns.close();
  bool ran = false;
  EXPECT_THROW(turns.run(1, [&] { ran = true; }), Turns::Closed);
  EXPECT_FALSE(ran);
  Turns others(2);
  std::jthread meets([&] { EXPECT_THROW(others.meet(1), Turns::Closed); });  // member 0, which never comes
  others.close();
}

}  // namespace
}  // namespace fedshard::train
