// A thread that runs closures one after another, and the Work that tells of each. It logs where its maker does.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "fedshard/comm/communicator.h"

namespace fedshard::comm {

// Done before it began: for communicators of one member.
WorkPtr finished_work();

class Worker {
 public:
  Worker();
  // Runs what is queued, then joins.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  // After a task has thrown, the tasks behind it throw the same without running: the members no longer agree on what
  // comes next.
  WorkPtr run(std::function<void()> task);

 private:
  class TaskWork;
  void loop();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<TaskWork>> queue_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace fedshard::comm
