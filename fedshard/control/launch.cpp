#include "fedshard/control/launch.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numeric>
#include <thread>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/control/children.h"
#include "fedshard/control/membership.h"

namespace fedshard::control {
namespace {

using base::ExitStatus;
using base::fail;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kPeersLost = static_cast<int>(ExitStatus::peers_lost);
constexpr int kStopped = static_cast<int>(ExitStatus::stopped);
constexpr milliseconds kPoll{20};
constexpr int kPollsPerIdle = 5;
constexpr const char* kLauncherPid = "FEDSHARD_LAUNCHER_PID";
constexpr std::size_t kTailBytes = 4096;
constexpr std::size_t kTailLines = 20;
constexpr std::int64_t kLeastBytesOfARank = std::int64_t{48} << 20;  // that no two of them share; measured: from 57 MiB

// Written by the handler, which may run on any thread.
std::atomic<int> caught_signal{0};
std::atomic<int> caught_count{0};
static_assert(std::atomic<int>::is_always_lock_free);
std::atomic_flag launching = ATOMIC_FLAG_INIT;

// While it lives, signals that ask the launcher to stop are noted instead.
class SignalNotes {
 public:
  SignalNotes() {
    base::require(!launching.test_and_set(), "two local launches at a time");
    caught_signal = 0;
    caught_count = 0;
    struct sigaction note {};
    note.sa_handler = [](int signal) {
      int none = 0;
      caught_signal.compare_exchange_strong(none, signal);
      ++caught_count;
    };
    ::sigemptyset(&note.sa_mask);
    // Who starts us may ignore SIGCHLD, and then the kernel reaps children before they have been asked.
    struct sigaction plain {};
    plain.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &plain, &child_before_);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      // Whoever ignores a signal (nohup) goes on ignoring it.
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &note, nullptr);
    }
  }
  ~SignalNotes() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
    ::sigaction(SIGCHLD, &child_before_, nullptr);
    launching.clear();
  }
  SignalNotes(const SignalNotes&) = delete;
  SignalNotes& operator=(const SignalNotes&) = delete;

  int signal() const { return caught_signal; }
  int count() const { return caught_count; }

 private:
  static constexpr std::array<int, 3> kSignals{SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, 3> before_{};
  struct sigaction child_before_ {};
};

std::vector<std::string> environment_of(const LocalLaunch& launch, int rank, int ranks) {
  std::map<std::string, std::string> variables = launch.environment;
  variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(ranks);
  variables["MASTER_ADDR"] = launch.master_address;
  variables["MASTER_PORT"] = std::to_string(launch.master_port);
  variables["FEDSHARD_COORDINATOR"] = launch.coordinator;
  variables["FEDSHARD_RUN_TOKEN"] = launch.run_token;
  variables[kLauncherPid] = std::to_string(::getpid());
  std::vector<std::string> list;
  for (char** inherited = environ; *inherited != nullptr; ++inherited) {
    const std::string entry = *inherited;
    if (!variables.contains(entry.substr(0, entry.find('=')))) list.push_back(entry);
  }
  for (const auto& [name, value] : variables) list.push_back(fmt::format("{}={}", name, value));
  return list;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

// The last lines of a rank's standard error; empty where it wrote none.
std::string tail_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary | std::ios::ate);
  if (!in) return "";
  const auto size = static_cast<std::size_t>(in.tellg());
  in.seekg(static_cast<std::streamoff>(size - std::min(size, kTailBytes)));
  std::string text{std::istreambuf_iterator<char>(in), {}};
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::size_t start = text.size();
  for (std::size_t lines = 0; lines < kTailLines && start != std::string::npos && start > 0; ++lines) {
    start = text.rfind('\n', start - 1);
  }
  return start == std::string::npos ? text : text.substr(start == 0 ? 0 : start + 1);
}

// One launch from the first rank's start to the last one's end.
class Supervisor {
 public:
  explicit Supervisor(const LocalLaunch& launch);
  LaunchResult run();

 private:
  void start();
  void note(const ChildExit& exit);
  void look_for_cause();
  void end_ranks(int signal, double grace_s);
  void heed_signals();
  std::optional<RankError> reported() const { return launch_.reported_error ? launch_.reported_error() : std::nullopt; }
  int processes() const { return membership_.ranks() / launch_.virtual_groups; }
  int process_of(int rank) const { return rank < 0 ? rank : rank % processes(); }
  std::string who(int rank) const { return rank_name(rank, membership_.group_of(rank)); }
  std::string who_all(int process) const;
  std::filesystem::path error_file(int rank) const { return launch_.output_folder / fmt::format("rank{}.err", rank); }
  LaunchResult result() const;
  LaunchResult blame(const ChildExit& cause) const;
  LaunchResult blame(const RankError& report) const;

  const LocalLaunch& launch_;
  const Membership membership_;
  const SignalNotes signals_;
  Children children_;  // after the signals: it is destroyed while they are still only noted
  std::vector<ChildExit> exits_;
  std::optional<ChildExit> killed_or_failed_;  // the first end that speaks for itself
  std::optional<ChildExit> lost_peers_;        // the first end with status 4
  Clock::time_point lost_peers_at_;
  std::optional<ChildExit> cause_;
  std::optional<RankError> earlier_report_;  // what the coordinator knew when the cause was seen
  bool ending_ = false;
  bool interrupted_ = false;
  std::optional<Clock::time_point> kill_at_;
};

Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Supervisor::Supervisor(const LocalLaunch& launch) : launch_(launch), membership_(launch.group_sizes) {}

void Supervisor::start() {
  std::error_code error;
  std::filesystem::create_directories(launch_.output_folder, error);
  if (error) fail<base::RunError>("{}: cannot create: {}", launch_.output_folder.string(), error.message());
  for (int process = 0; process < processes(); ++process) {
    children_.start(launch_.program, launch_.arguments, environment_of(launch_, process, processes()),
                    error_file(process));
  }
}

// The ranks that go with a process.
std::string Supervisor::who_all(int process) const {
  if (launch_.virtual_groups == 1) return who(process);
  std::vector<int> ranks;
  for (int rank = process; rank < membership_.ranks(); rank += processes()) ranks.push_back(rank);
  return fmt::format("process {} ({}, one of each group)", process, list_ranks(ranks));
}

LaunchResult Supervisor::run() {
  start();
  for (int polls = 0;; ++polls) {
    for (const ChildExit& exit : children_.reap()) note(exit);
    if (children_.all_reaped()) break;
    heed_signals();
    look_for_cause();
    if (kill_at_ && Clock::now() >= *kill_at_) {
      children_.signal_all(SIGKILL);
      kill_at_.reset();
    }
    if (launch_.on_idle && polls % kPollsPerIdle == 0) launch_.on_idle();
    std::this_thread::sleep_for(kPoll);
  }
  if (!ending_) look_for_cause();
  return result();
}

void Supervisor::note(const ChildExit& exit) {
  exits_.push_back(exit);
  if (ending_ || interrupted_ || !exit.is_failure() || exit.status == kStopped) return;
  if (exit.signal == 0 && exit.status == kPeersLost) {
    if (!lost_peers_) lost_peers_at_ = Clock::now();
    if (!lost_peers_) lost_peers_ = exit;
  } else if (!killed_or_failed_ || (killed_or_failed_->signal == 0 && exit.signal != 0)) {
    killed_or_failed_ = exit;  // of those found in one look, a killed one comes first
  }
}

void Supervisor::look_for_cause() {
  if (ending_ || interrupted_) return;
  if (killed_or_failed_) {
    cause_ = killed_or_failed_;
  } else if (lost_peers_ && (children_.all_reaped() ||
                             Clock::now() >= lost_peers_at_ + std::chrono::duration<double>(launch_.cause_wait_s))) {
    cause_ = lost_peers_;
  } else {
    return;
  }
  earlier_report_ = reported();
  ending_ = true;
  end_ranks(SIGTERM, launch_.grace_s);
}

void Supervisor::end_ranks(int signal, double grace_s) {
  children_.signal_all(signal);
  kill_at_ = after(grace_s);
}

void Supervisor::heed_signals() {
  const int signal = signals_.signal();
  if (signal == 0) return;
  if (!ending_ && !interrupted_) {
    interrupted_ = true;
    end_ranks(signal, launch_.stop_grace_s);
  }
  // A second signal, or one after a failure, is impatience.
  if (signals_.count() > 1 || ending_) children_.signal_all(SIGKILL);
}

// A rank that was killed, or left for its own reasons, speaks for itself, unless another one had reported its error
// before: then the end seen here is the echo. Nobody is killed with SIGKILL as an echo.
LaunchResult Supervisor::blame(const ChildExit& cause) const {
  const bool is_weak = cause.signal == 0 && cause.status == kPeersLost;
  const auto is_earlier = [&](const std::optional<RankError>& report) {
    return report && process_of(report->rank) != cause.rank && report->status != kPeersLost && cause.signal != SIGKILL;
  };
  const auto report = reported();
  const bool reported_itself = report && process_of(report->rank) == cause.rank;
  if (is_earlier(earlier_report_)) return blame(*earlier_report_);
  if (is_weak && report && !reported_itself) return blame(*report);
  std::string words = reported_itself ? std::string(own_words(report->rank, report->group, report->message))
                                      : tail_of(error_file(cause.rank));
  if (cause.signal != 0) {
    std::string killed = fmt::format("{} was killed by {}", who_all(cause.rank), signal_name(cause.signal));
    if (cause.signal == SIGKILL) killed += " (if nobody did that, the machine ran out of memory)";
    return {kPeersLost, cause.rank, words.empty() ? killed : fmt::format("{}: {}", killed, words)};
  }
  if (words.empty()) words = "it said nothing about the reason";
  const std::string name = reported_itself ? who(report->rank) : who_all(cause.rank);
  return {cause.status, cause.rank, fmt::format("{} ended with status {}: {}", name, cause.status, words)};
}

LaunchResult Supervisor::blame(const RankError& report) const {
  if (report.rank < 0) return {report.status, -1, report.message};
  return {report.status, report.rank,
          fmt::format("{}: {}", who(report.rank), own_words(report.rank, report.group, report.message))};
}

LaunchResult Supervisor::result() const {
  if (cause_) return blame(*cause_);
  const auto all_end_with = [this](auto&& accepts) {
    return std::all_of(exits_.begin(), exits_.end(),
                       [&](const ChildExit& exit) { return exit.signal == 0 && accepts(exit.status); });
  };
  if (all_end_with([](int status) { return status == 0; })) return {};
  if (all_end_with([](int status) { return status == 0 || status == kStopped; })) return {kStopped, -1, ""};
  return {128 + signals_.signal(), -1, fmt::format("stopped by {}", signal_name(signals_.signal()))};
}

}  // namespace

std::int64_t memory_bytes() { return std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE); }

void check_memory(int processes) {
  if (processes > memory_bytes() / kLeastBytesOfARank) {
    fail<base::UsageError>(
        "{} ranks on this machine would take more than its {} GiB of memory; start fewer, or on more machines",
        processes, memory_bytes() >> 30);
  }
}

LaunchResult run_local(const LocalLaunch& launch) { return Supervisor(launch).run(); }

void die_with_parent() {
  const char* launcher = std::getenv(kLauncherPid);
  if (launcher == nullptr) return;
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
    fail<base::RunError>("cannot tie this process to its launcher: {}", std::strerror(errno));
  }
  // It may have died before the kernel was asked to watch.
  if (std::to_string(::getppid()) != launcher) {
    fail<base::PeersLostError>("the launcher (process {}) that started this rank is gone", launcher);
  }
}

}  // namespace fedshard::control
