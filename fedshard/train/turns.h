// Virtual groups: the ranks of several groups as threads of one process, of which one at a time trains.
//
// A strict round robin of laps: run() returns when every member has had its turn of the lap. So nobody waits in a
// message for a group that has still to compute, whose deadline that would eat, and what all groups do together finds
// all of them there. A member that has less to do before it than others waits in meet().
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace fedshard::train {

class Turns {
 public:
  // Thrown to those who wait or come after close(). Not one of base's errors: whoever closed has the error to tell.
  struct Closed {};

  // Members are 0 to members - 1, a thread each.
  explicit Turns(int members) : waits_(static_cast<std::size_t>(members), false) {}

  // Runs work() in this member's turn and waits for the others to have theirs, but for those in meet(). A member must
  // make the same calls of both in every process, members that have made unlike numbers of run() must meet before they
  // do anything else together, and `work` may wait for ranks of its own group only; then no order of threads and
  // processes deadlocks. What `work` throws is passed on and closes the turns.
  void run(int member, const std::function<void()>& work);

  // Waits, without turns, until all members are here.
  void meet(int member);

  // Nobody gets a turn any more: all who wait are woken.
  void close();

 private:
  void take(int member);
  void pass();
  void advance();
  void wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& condition);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> waits_;  // by member: is in meet()
  int next_ = 0;             // whose turn it is
  std::int64_t laps_ = 0;
  std::int64_t meetings_ = 0;
  bool closed_ = false;
};

}  // namespace fedshard::train
