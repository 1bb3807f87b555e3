#include "fedshard/comm/worker.h"

#include <utility>

#include "fedshard/base/log.h"

namespace fedshard::comm {
namespace {

class FinishedWork final : public Work {
 public:
  void wait() override {}
};

}  // namespace

WorkPtr finished_work() { return std::make_shared<FinishedWork>(); }

class Worker::TaskWork final : public Work {
 public:
  explicit TaskWork(std::function<void()> task) : task_(std::move(task)) {}

  void wait() override {
    std::unique_lock lock(mutex_);
    done_changed_.wait(lock, [this] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }

  // Runs the task, or fails at once with an earlier task's error. Returns this task's error, if any.
  std::exception_ptr complete(const std::exception_ptr& earlier) {
    std::exception_ptr error = earlier;
    if (!error) {
      try {
        task_();
      } catch (...) {
        error = std::current_exception();
      }
    }
    task_ = nullptr;  // lets go of the buffers before anybody is told
    {
      const std::lock_guard lock(mutex_);
      error_ = error;
      done_ = true;
    }
    done_changed_.notify_all();
    return error;
  }

 private:
  std::function<void()> task_;
  std::mutex mutex_;
  std::condition_variable done_changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

Worker::Worker()
    : thread_([this, log = base::own_log()] {
        base::share_log(log);
        loop();
      }) {}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

WorkPtr Worker::run(std::function<void()> task) {
  auto work = std::make_shared<TaskWork>(std::move(task));
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(work);
  }
  wake_.notify_all();
  return work;
}

void Worker::loop() {
  std::exception_ptr error;
  for (;;) {
    std::shared_ptr<TaskWork> work;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    error = work->complete(error);
  }
}

}  // namespace fedshard::comm
