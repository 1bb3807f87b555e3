#include "fedshard/train/turns.h"

namespace fedshard::train {

void Turns::run(int member, const std::function<void()>& work) {
  take(member);
  try {
    work();
  } catch (...) {
    close();
    throw;
  }
  pass(member);
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
  const std::int64_t mine = turns_had_[member] * std::ssize(turns_had_) + member;
  wait_until(lock, [&] { return turns_ == mine; });
}

void Turns::pass(int member) {
  std::unique_lock lock(mutex_);
  ++turns_;
  const std::int64_t meeting = ++turns_had_[member] * std::ssize(turns_had_);
  changed_.notify_all();
  wait_until(lock, [&] { return turns_ >= meeting; });
}

void Turns::wait_until(std::unique_lock<std::mutex>& lock, const std::function<bool()>& condition) {
  changed_.wait(lock, [&] { return closed_ || condition(); });
  if (closed_) throw Closed{};
}

}  // namespace fedshard::train
