#include "fedshard/train/turns.h"

#include <algorithm>

namespace fedshard::train {

void Turns::run(int member, const std::function<void()>& work) {
  take(member);
  try {
    work();
  } catch (...) {
    close();
    throw;
  }
  pass();
}

void Turns::meet(int member) {
  std::unique_lock lock(mutex_);
  waits_.at(static_cast<std::size_t>(member)) = true;
  if (std::find(waits_.begin(), waits_.end(), false) == waits_.end()) {
    std::fill(waits_.begin(), waits_.end(), false);
    next_ = 0;
    ++meetings_;
    changed_.notify_all();
    return;
  }
  if (next_ == member) advance();
  wait_until(lock, [&, meeting = meetings_ + 1] { return meetings_ >= meeting; });
}

void Turns::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

void Turns::take(int member) {
  std::unique_lock lock(mutex_);
  wait_until(lock, [&] { return next_ == member; });
}

void Turns::pass() {
  std::unique_lock lock(mutex_);
  const std::int64_t lap = laps_;
  advance();
  wait_until(lock, [&] { return laps_ > lap; });
}

// To the next member that is not in meet(), of whom there is one.
void Turns::advance() {
  do {
    if (++next_ == std::ssize(waits_)) {
      next_ = 0;
      ++laps_;
    }
  } while (waits_[static_cast<std::size_t>(next_)]);
  changed_.notify_all();
}

void Turns::wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& condition) {
  changed_.wait(lock, [&] { return closed_ || condition(); });
  if (closed_) throw Closed{};
}

}  // namespace fedshard::train
