// Starts the ranks of a run on this machine and answers for them: no rank is left behind, and the first real error is
// the one that is told.
// The surprising part: an exit with status 4 (peers lost) is not taken as the cause at once. A survivor may end with it
// before the rank that was killed has been reaped, so the launcher waits a moment for something better.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "fedshard/control/messages.h"

namespace fedshard::control {

struct LocalLaunch {
  std::string program = "/proc/self/exe";
  std::vector<std::string> arguments;  // after the program's name
  std::vector<int> group_sizes = {1};  // their sum is the number of ranks; ranks are numbered group by group
  // More than 1: there is a process for each rank of group 0, which holds a rank of every (then equal) group. `rank`
  // below and in what a process sees is that of group 0, the process's number; messages name all ranks.
  int virtual_groups = 1;
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  std::string coordinator;  // endpoint
  std::string run_token;
  std::map<std::string, std::string> environment;  // further variables; they win over inherited ones
  std::filesystem::path output_folder;             // rank N's standard error goes to rankN.err in it; created
  double grace_s = 3;                              // between SIGTERM and SIGKILL after a failure
  double stop_grace_s = 30;       // the same after the launcher itself was signalled: ranks may be saving
  double cause_wait_s = 1;        // how long a status 4 waits for a better cause
  std::function<void()> on_idle;  // about every 100 ms
  std::function<std::optional<RankError>()> reported_error;  // the coordinator's first error
};

struct LaunchResult {
  int status = 0;       // the exit status that the launcher should end with
  int rank = -1;        // whose failure it was; -1 where it was nobody's in particular
  std::string message;  // one line about the failure (and perhaps the last lines of that rank's standard error)
};

// Starts the ranks, waits for all of them and returns; on return, and when it throws, every rank is reaped and nothing
// of its process group lives. Each rank leads a process group of its own, has no standard input, shares standard
// output, and sees RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, FEDSHARD_COORDINATOR,
// FEDSHARD_RUN_TOKEN and FEDSHARD_LAUNCHER_PID.
// - All ranks end with 0: status 0. Some end with 5 (stopped) and none fails: 5.
// - A rank fails: the others get SIGTERM, after `grace_s` SIGKILL. Killed by a signal: status 4 and the signal's name.
//   Ended with status s: s and its own words from `reported_error` or else its standard error.
// - SIGINT, SIGTERM or SIGHUP to the launcher is passed on, and after `stop_grace_s` or a second signal comes SIGKILL:
//   status 128 + the signal's number, unless all ranks end with 0 or 5.
// One launch at a time in a process. Throws RunError where a process or file can't be created.
LaunchResult run_local(const LocalLaunch& launch);

std::int64_t memory_bytes();  // of this machine

// Throws UsageError where so many ranks' processes, whatever they train, can't fit this machine's memory: a slip in
// their number would leave all of the machine without memory, the user's shell included.
void check_memory(int processes);

// Called by a rank at its start: it is killed when the launcher that started it dies, however that happens. Does
// nothing in a process that no launcher of ours started. Throws PeersLostError where the launcher is dead already. The
// kernel watches the *thread* that called run_local().
void die_with_parent();

}  // namespace fedshard::control
