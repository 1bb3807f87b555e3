// The processes of a local launch: started with posix_spawn, watched, signalled and reaped.
// The surprising part: a process is first seen dead, then its process group is killed, then it is reaped. As long as it
// is a zombie its number can't be given to anybody else, so the signal can't hit a stranger.
#pragma once
#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace fedshard::control {

struct ChildExit {
  int rank = 0;
  int status = 0;  // exit status; 0 where a signal killed it
  int signal = 0;  // 0 where it exited by itself
  bool is_failure() const { return signal != 0 || status != 0; }
};

class Children {
 public:
  Children() = default;
  ~Children();  // kills and reaps what is left
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // Ranks are numbered in the order of these calls. `environment` is whole ("NAME=value"). Standard error goes to
  // `error_file` (emptied), standard input is empty. Throws RunError.
  void start(const std::string& program, const std::vector<std::string>& arguments,
             const std::vector<std::string>& environment, const std::filesystem::path& error_file);

  std::vector<ChildExit> reap();  // those that have died since the last call, without waiting
  void signal_all(int signal);    // to the process groups of the living
  bool all_reaped() const;

 private:
  struct Child {
    pid_t pid;
    bool reaped;
  };
  std::vector<Child> children_;  // by rank
};

}  // namespace fedshard::control
