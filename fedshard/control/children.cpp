#include "fedshard/control/children.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "fedshard/base/error.h"

namespace fedshard::control {
namespace {

// What posix_spawn is told; both parts own memory.
class SpawnPlan {
 public:
  explicit SpawnPlan(const std::filesystem::path& error_file) {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions_, STDERR_FILENO, error_file.c_str(),
                                       O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0666);
    ::posix_spawnattr_init(&attributes_);
    // A rank must not inherit what its launcher blocks or ignores, and Ctrl-C must reach it through the launcher alone.
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    ::posix_spawnattr_setpgroup(&attributes_, 0);
    sigset_t none, all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
  }
  ~SpawnPlan() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;

  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
};

// The null-ended array of C strings that exec wants; valid as long as `strings`.
std::vector<char*> as_array(const std::vector<std::string>& strings) {
  std::vector<char*> array;
  for (const std::string& s : strings) array.push_back(const_cast<char*>(s.c_str()));
  array.push_back(nullptr);
  return array;
}

}  // namespace

Children::~Children() {
  signal_all(SIGKILL);
  for (Child& child : children_) {
    if (child.reaped) continue;
    while (::waitpid(child.pid, nullptr, 0) < 0 && errno == EINTR) continue;
  }
}

void Children::start(const std::string& program, const std::vector<std::string>& arguments,
                     const std::vector<std::string>& environment, const std::filesystem::path& error_file) {
  const SpawnPlan plan(error_file);
  std::vector<std::string> words{program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const auto argv = as_array(words);
  const auto envp = as_array(environment);
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, program.c_str(), plan.actions(), plan.attributes(), argv.data(), envp.data());
  if (error != 0) {
    base::fail<base::RunError>("cannot start rank {} ({}, standard error to {}): {}", children_.size(), program,
                               error_file.string(), std::strerror(error));
  }
  children_.push_back({pid, false});
}

std::vector<ChildExit> Children::reap() {
  std::vector<ChildExit> exits;
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    Child& child = children_[rank];
    if (child.reaped) continue;
    siginfo_t seen{};
    if (::waitid(P_PID, static_cast<id_t>(child.pid), &seen, WEXITED | WNOHANG | WNOWAIT) != 0) {
      base::fail<base::RunError>("cannot wait for rank {} (process {}): {}", rank, child.pid, std::strerror(errno));
    }
    if (seen.si_pid == 0) continue;
    ::kill(-child.pid, SIGKILL);  // what it left behind
    int raw = 0;
    while (::waitpid(child.pid, &raw, 0) < 0 && errno == EINTR) continue;
    child.reaped = true;
    exits.push_back(
        {static_cast<int>(rank), WIFEXITED(raw) ? WEXITSTATUS(raw) : 0, WIFSIGNALED(raw) ? WTERMSIG(raw) : 0});
  }
  return exits;
}

void Children::signal_all(int signal) {
  for (const Child& child : children_) {
    if (!child.reaped) ::kill(-child.pid, signal);
  }
}

bool Children::all_reaped() const {
  return std::all_of(children_.begin(), children_.end(), [](const Child& c) { return c.reaped; });
}

}  // namespace fedshard::control
