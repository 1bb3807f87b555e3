// Errors that end a run, and the exit status each one stands for.
// fedshard throws for what is fatal and returns what is expected; nothing is logged and ignored. A message says what
// failed, on which rank and group, for which tensor or file, and what to do.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace fedshard::base {

// The status with which `fedshard` ends; part of the command line's contract.
enum class ExitStatus : int {
  ok = 0,
  failed = 1,      // failed while running
  usage = 2,       // wrong usage or configuration
  damaged = 3,     // damaged data or checkpoint
  peers_lost = 4,  // peers died or did not answer before a deadline
  stopped = 5,     // stopped at a signal or time limit
};

class Error : public std::runtime_error {
 public:
  Error(ExitStatus status, const std::string& message) : std::runtime_error(message), status_(status) {}
  ExitStatus status() const { return status_; }

 private:
  ExitStatus status_;
};

struct RunError : Error {
  explicit RunError(const std::string& m) : Error(ExitStatus::failed, m) {}
};
struct UsageError : Error {
  explicit UsageError(const std::string& m) : Error(ExitStatus::usage, m) {}
};
struct DamagedError : Error {
  explicit DamagedError(const std::string& m) : Error(ExitStatus::damaged, m) {}
};
struct PeersLostError : Error {
  explicit PeersLostError(const std::string& m) : Error(ExitStatus::peers_lost, m) {}
};

// fail<UsageError>("{} ranks cannot be split into groups of {}", 5, 2)
template <class Kind, class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Kind(fmt::format(format, std::forward<Args>(args)...));
}

// For what only a bug of ours can break. Unlike assert() it stays in release builds.
template <class... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) fail<RunError>("internal error: {}", fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fedshard::base
