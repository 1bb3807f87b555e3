// Virtual groups: the ranks of several groups as threads of one process, of which one at a time trains.
//
// A strict round robin, and a meeting after it: run() returns when every member has had this turn. So nobody waits in a
// message for a group that has still to compute, whose deadline that would eat, and what all groups do together finds
// all of them there.
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
  explicit Turns(int members) : turns_had_(members) {}

  // Runs work() in this member's turn and waits for the others to have theirs. All members must make the same sequence
  // of calls, in every process that they share, and `work` may wait for ranks of its own group only; then no order of
  // threads and processes deadlocks. What `work` throws is passed on and closes the turns.
  void run(int member, const std::function<void()>& work);

  // Nobody gets a turn any more: all who wait are woken.
  void close();

 private:
  void take(int member);
  void pass(int member);
  void wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& condition);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::int64_t> turns_had_;  // by member
  std::int64_t turns_ = 0;               // of all members together; number n is member n % members's
  bool closed_ = false;
};

}  // namespace fedshard::train
