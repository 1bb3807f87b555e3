// What the threads of the coordinator and of its clients have in common: how they start, wait and are woken.
// The surprising part: they block all signals, so that no call of theirs is interrupted and the program's handlers run
// on its own threads.
#pragma once
#include <chrono>
#include <functional>
#include <thread>

namespace fedshard::control {

std::thread start_io_thread(std::function<void()> body);

// Ends a wait in wait_readable() from another thread. An eventfd and no pair of ZeroMQ sockets, because those may not
// be shared by the many threads that post.
class WakeUp {
 public:
  WakeUp();  // throws RunError where the system has no descriptor left
  ~WakeUp();
  WakeUp(const WakeUp&) = delete;
  WakeUp& operator=(const WakeUp&) = delete;

  int fd() const { return fd_; }  // readable from notify() to clear()
  void notify();                  // from any thread
  void clear();

 private:
  int fd_;
};

// Returns when one of the ZeroMQ sockets has something to read, `wake_up` was notified (and clears it), or `patience`
// is over; perhaps earlier.
void wait_readable(std::initializer_list<void*> sockets, WakeUp& wake_up, std::chrono::milliseconds patience);

}  // namespace fedshard::control
