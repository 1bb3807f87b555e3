// Time as an interface, so that deadlines and heartbeats can be tested without waiting.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace fedshard::base {

class Clock {
 public:
  virtual ~Clock() = default;
  // Seconds since an arbitrary origin; never goes back. Safe from any thread.
  virtual double now() const = 0;
};

class SteadyClock final : public Clock {
 public:
  double now() const override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

class ManualClock final : public Clock {
 public:
  double now() const override { return static_cast<double>(micros_.load()) * 1e-6; }
  void advance(double seconds) { micros_ += static_cast<std::int64_t>(seconds * 1e6); }

 private:
  std::atomic<std::int64_t> micros_{0};
};

}  // namespace fedshard::base
