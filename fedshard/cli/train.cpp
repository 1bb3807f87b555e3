#include "fedshard/cli/train.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>

#include "fedshard/base/error.h"
#include "fedshard/base/log.h"
#include "fedshard/base/parse.h"
#include "fedshard/comm/gloo.h"
#include "fedshard/comm/nccl.h"
#include "fedshard/comm/store.h"
#include "fedshard/control/launch.h"
#include "fedshard/control/place.h"
#include "fedshard/control/ports.h"
#include "fedshard/forecast/forecast.h"
#include "fedshard/train/host.h"
#include "fedshard/train/inputs.h"
#include "fedshard/train/rank.h"

namespace fedshard::cli {
namespace {

constexpr const char* kLoopback = "127.0.0.1";
constexpr double kLastWordsS = 5;

// A port that the user fixed is taken as it is, or refused; 0: the system chooses.
int port_of_environment() {
  const auto text = control::process_environment("MASTER_PORT");
  if (!text) return 0;
  const int port = base::parse_number<int>(*text).value_or(0);
  if (port < 1 || port > 65535) {
    base::fail<base::UsageError>("the environment variable MASTER_PORT is '{}', which is not a port (1 to 65535)",
                                 *text);
  }
  return port;
}

int launch_ranks(const TrainArgs& args, const config::Config& config, const topology::Layout& layout,
                 int virtual_groups) {
  if (!config.comm.interface.empty()) comm::require_interface(config.comm.interface);
  // Inputs are opened here once, so that whatever is wrong with them is said before a rank exists, and raw text is
  // prepared by one process.
  train::open_inputs(config, [](const data::PrepareProgress& p) {
    if (::isatty(STDERR_FILENO) == 0) return;
    fmt::print(stderr, "\rpreparing text: {} of {} MiB{}", p.bytes >> 20, p.total_bytes >> 20,
               p.bytes == p.total_bytes ? "\n" : "");
  });
  control::ListeningSocket socket = control::listen_on(kLoopback, port_of_environment());
  const int port = socket.port();
  train::RunHost host(config, layout, kLoopback);
  base::log_to_file(host.folder().path() / "ranks" / "launcher.log.txt");
  base::log_as("launcher");
  const auto store = comm::Store::serve(socket.release(), kLoopback, port,
                                        std::chrono::milliseconds(static_cast<int>(config.comm.timeout_s * 1000)));
  control::LocalLaunch launch;
  launch.arguments = {"train", args.config};
  for (const std::string& override_text : args.overrides) {
    launch.arguments.push_back("--set");
    launch.arguments.push_back(override_text);
  }
  if (virtual_groups > 1) {
    launch.arguments.push_back("--virtual-groups");
    launch.arguments.push_back(std::to_string(virtual_groups));
  }
  launch.group_sizes = layout.sizes();
  launch.virtual_groups = virtual_groups;
  launch.master_address = kLoopback;
  launch.master_port = port;
  launch.coordinator = host.endpoint();
  launch.run_token = host.run_token();
  // Compute threads that spin while they wait take the cores that communication needs: a small rank was 24 times slower
  // on a full machine. A user's own choice stands.
  if (!control::process_environment("OMP_WAIT_POLICY")) launch.environment["OMP_WAIT_POLICY"] = "passive";
  launch.output_folder = host.folder().path() / "ranks";
  launch.reported_error = [&] { return host.status().first_error; };
  const control::LaunchResult result = control::run_local(launch);
  host.finish(result.status == 0 ? kLastWordsS : 0);
  if (!result.message.empty()) {
    base::log_error("{}", result.message);
    fmt::print(stderr, "fedshard: {}\n", result.message);
  }
  return result.status;
}

}  // namespace

int train(const TrainArgs& args) {
  config::Config config = config::load_config(args.config, args.overrides);
  if (args.virtual_groups) config = config::with_virtual_groups(std::move(config), *args.virtual_groups);
  const int virtual_groups = args.virtual_groups.value_or(1);
  const auto place = args.ranks ? std::nullopt : control::place_from_environment(control::process_environment);
  const int processes = args.ranks ? *args.ranks : place ? place->world_size : 1;
  int world = 0;
  if (__builtin_mul_overflow(processes, virtual_groups, &world)) {
    base::fail<base::UsageError>("{} processes with a rank of {} virtual groups each are too many ranks", processes,
                                 virtual_groups);
  }
  const topology::Layout layout = config::validate(config, world);
  // Said once: under our own launcher, which hosts the coordinator, by it alone.
  if (!place || (place->rank == 0 && place->coordinator.empty())) {
    for (const std::string& warning : config::warnings_of(config))
      fmt::print(stderr, "fedshard: warning: {}\n", warning);
  }
  if (args.dry_run) {
    if (!place || place->rank == 0) forecast::print_dry_run(config, layout);
    return 0;
  }
  if (config.comm.backend == config::BackendChoice::nccl) comm::require_nccl();  // a dry run needs none
  // Gloo and the store write to sockets whose other end may have died; that is an error to tell, not to die of.
  ::signal(SIGPIPE, SIG_IGN);
  if (place) return static_cast<int>(train::run_ranks(config, *place, virtual_groups));
  control::check_memory(processes);
  return launch_ranks(args, config, layout, virtual_groups);
}

}  // namespace fedshard::cli
