#include "fedshard/train/rank.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "fedshard/base/log.h"
#include "fedshard/comm/by_place.h"
#include "fedshard/comm/gloo.h"
#include "fedshard/comm/loopback.h"
#include "fedshard/comm/nccl.h"
#include "fedshard/comm/plain_words.h"
#include "fedshard/comm/store.h"
#include "fedshard/control/launch.h"
#include "fedshard/train/host.h"
#include "fedshard/train/open_store.h"
#include "fedshard/train/tensor_memory.h"
#include "fedshard/train/trainer.h"
#include "fedshard/train/turns.h"
#include "fedshard/train/version.h"

namespace fedshard::train {
namespace {

constexpr const char* kEndpointKey = "fedshard/coordinator";
constexpr const char* kTokenKey = "fedshard/run_token";
constexpr double kVerdictS = 4;     // how long it waits, where it failed itself, for what the others have to say
constexpr double kLastWordsS = 60;  // how long rank 0 waits for the others' last words where it hosts the coordinator

std::chrono::milliseconds timeout_of(const config::Config& config) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(config.comm.timeout_s * 1000));
}

// Of computation, of the calling thread.
void set_threads(const config::Config& config, const control::Place& process) {
  int threads = config.training.threads;
  if (threads == 0) {
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    threads = std::max(1, cores / process.local_size.value_or(process.world_size));
  }
  at::set_num_threads(threads);
}

// Everything that connects one rank to the others, in the order in which it must be taken down (last first).
struct Connections {
  std::shared_ptr<comm::Store> store;
  std::unique_ptr<control::CoordinatorClient> coordinator;
  std::unique_ptr<comm::TrafficCounter> traffic;
  std::unique_ptr<comm::Backend> backend;
  at::Device device = at::kCPU;  // that computes
  comm::Axes axes;
  // For rounds with a delay, which run beside training: what they exchange is the host's.
  std::unique_ptr<comm::TrafficCounter> round_traffic;
  std::optional<comm::Axes> round_axes;
};

// This process: the place that its launcher gave it, and its ranks, one of each virtual group.
struct Process {
  Process(const config::Config& the_config, const control::Place& the_place, int virtual_groups)
      : config(the_config),
        place(the_place),
        inside(timeout_of(the_config)),
        turns(virtual_groups),
        ranks(static_cast<std::size_t>(virtual_groups)) {}

  int groups() const { return static_cast<int>(ranks.size()); }
  int world() const { return place.world_size * groups(); }
  int rank(int group) const { return group * place.world_size + place.rank; }
  bool hosts_coordinator() const { return place.coordinator.empty() && place.rank == 0; }

  const config::Config& config;
  const control::Place& place;
  std::unique_ptr<RunHost> host;  // where it hosts the coordinator
  comm::LoopbackWorld inside;
  Turns turns;
  std::vector<Connections> ranks;  // by group
  std::mutex leaving;              // never let go: the process ends with the error of the rank that took it
};

std::unique_ptr<control::CoordinatorClient> join_coordinator(const Process& process, const topology::Layout& layout,
                                                             int rank, comm::Store& store) {
  const control::Place& place = process.place;
  const bool from_store = place.coordinator.empty();  // else our launcher has put both into the environment
  control::ClientOptions options{
      .endpoint = from_store ? store.get(kEndpointKey) : place.coordinator,
      .token = control::RunToken::parse(from_store ? store.get(kTokenKey) : place.run_token),
      .rank = rank,
      .group = layout.group_of(rank),
      .version = versions().at("fedshard"),
      .config_digest = fmt::format("{}# {}\n", config::resolved_toml(process.config), layout.describe()),
      .silence_s = silence_s(process.config),
      .on_abort = nullptr,
      // Time for the main thread to report by itself, where it is not stuck in a collective.
      .exit_on_abort_s = 1.0};
  options.answer_s += process.config.federation.every.seconds;  // as the coordinator's deadline for a round
  return std::make_unique<control::CoordinatorClient>(std::move(options));
}

std::string address_of(const control::Place& place) {
  return comm::address_towards(place.master_address, place.master_port);
}

// All ranks' lines to store and coordinator. One after another, so that a rank that fails later finds those of all.
void join(Process& process, const topology::Layout& layout) {
  for (int group = 0; group < process.groups(); ++group) {
    Connections& to = process.ranks[group];
    to.store = open_store(process.place, timeout_of(process.config), /*may_serve=*/group == 0);
    if (group == 0 && process.hosts_coordinator()) {
      const std::string& interface = process.config.comm.interface;
      process.host =
          std::make_unique<RunHost>(process.config, layout, interface.empty() ? address_of(process.place) : interface);
      to.store->set(kEndpointKey, process.host->endpoint());
      to.store->set(kTokenKey, process.host->run_token());
    }
    to.coordinator = join_coordinator(process, layout, process.rank(group), *to.store);
  }
}

void connect(Process& process, const topology::Layout& layout, int group) {
  const config::Config& config = process.config;
  Connections& to = process.ranks[group];
  const int rank = process.rank(group);
  to.traffic = std::make_unique<comm::TrafficCounter>(comm::groups_by_rank(layout));
  std::vector<int> here;
  for (int g = 0; g < process.groups(); ++g) here.push_back(process.rank(g));
  to.backend = comm::make_backend_by_place(
      here, process.inside.backend(rank),
      comm::make_gloo_backend(to.store, {config.comm.interface, address_of(process.place), timeout_of(config)}));
  const comm::Watcher watcher = [client = to.coordinator.get()](const std::string& what) {
    client->begin_collective(what);
  };
  comm::Connect connect = comm::connect_over_messages(*to.backend, *to.traffic, watcher);
  if (config.comm.backend == config::BackendChoice::nccl) {
    connect = comm::connect_over_nccl(to.store, {to.device, timeout_of(config), connect}, *to.traffic, watcher);
  }
  to.axes = comm::make_axes(layout, rank, connect);
  if (config.federation.delay == 0 || layout.groups() == 1) return;
  to.round_traffic = std::make_unique<comm::TrafficCounter>(comm::groups_by_rank(layout));
  to.round_axes = comm::make_axes(layout, rank, comm::connect_over_messages(*to.backend, *to.round_traffic, watcher),
                                  ", beside training");
}

// "rank 3 of 8, local rank 1 of 4, store at node1:29500 (from Slurm's variables); fl+fsdp: 8 ranks = ..."
std::string describe(const Process& process, const topology::Layout& layout, int group) {
  control::Place place = process.place;
  std::string sharing;
  if (process.groups() > 1) {
    sharing = fmt::format(", one of {} ranks in process {} of {}", process.groups(), place.rank, place.world_size);
    place.rank = process.rank(group);
    place.world_size = process.world();
    place.local_rank = place.local_size = std::nullopt;
  }
  return fmt::format("{}{}; {}", control::describe(place), sharing, layout.describe());
}

void introduce(const Process& process, const topology::Layout& layout, int group) {
  const int rank = process.rank(group);
  base::log_to_file(metrics::RunFolder(process.config.metrics.folder).log(rank));
  const std::string where = describe(process, layout, group);
  base::log_info("{}", where);
  if (rank != 0) return;
  for (const std::string& warning : config::warnings_of(process.config)) base::log_info("warning: {}", warning);
  // Our own launcher has said so already; under another one it is worth knowing whom we believed.
  if (process.host) std::fprintf(stderr, "fedshard: %s\n", where.c_str());
}

base::ExitStatus train(Process& process, const topology::Layout& layout, const Inputs& inputs, int group) {
  introduce(process, layout, group);
  connect(process, layout, group);
  Connections& connections = process.ranks[group];
  const int rank = process.rank(group);
  const base::SteadyClock clock;
  std::unique_ptr<metrics::Trace> trace;
  if (process.config.metrics.trace) {
    trace =
        std::make_unique<metrics::Trace>(metrics::RunFolder(process.config.metrics.folder).trace(rank), rank, clock);
  }
  base::ExitStatus status{};
  {
    Connections& c = connections;
    Trainer trainer({process.config, layout, rank, inputs, c.axes, *c.traffic, c.round_axes ? *c.round_axes : c.axes,
                     c.round_traffic ? *c.round_traffic : *c.traffic, *c.coordinator, trace.get(), c.device,
                     process.groups() > 1 ? &process.turns : nullptr});
    status = trainer.run();
  }
  if (trace) trace->close();
  connections.coordinator->goodbye(static_cast<int>(status));
  return status;
}

// The others go down with this rank, which is no failure of theirs.
void report(Process& process, int group, const base::Error& error) {
  const auto tell = [&](int g, const std::string& words, base::ExitStatus status) {
    if (process.ranks[g].coordinator) process.ranks[g].coordinator->report_error(words, static_cast<int>(status));
  };
  tell(group, error.what(), error.status());
  for (int g = 0; g < process.groups(); ++g) {
    if (g == group) continue;
    tell(g, fmt::format("ended with rank {}, in whose process it was", process.rank(group)),
         base::ExitStatus::peers_lost);
  }
}

[[noreturn]] void leave(Process& process, int group, const base::Error& error) {
  process.leaving.lock();
  process.turns.close();
  if (process.ranks[group].coordinator) base::log_error("{}", error.what());  // before, the log is standard error
  report(process, group, error);
  int speaker = process.rank(group);
  std::string text = error.what();
  if (process.host) {
    process.host->finish(kVerdictS);
    // Where this rank only noticed that others were gone, it tells what the coordinator knows of the cause.
    const auto cause = process.host->status().first_error;
    if (cause && cause->rank >= 0 && error.status() == base::ExitStatus::peers_lost) {
      speaker = cause->rank;
      text = cause->message;
    }
  }
  const std::string name = fmt::format("rank {}", speaker);
  const bool names_itself = text.starts_with(name + ":") || text.starts_with(name + " ") || text.starts_with("ranks ");
  fmt::print(stderr, "fedshard: {}{}\n", names_itself ? "" : name + ": ", text);
  std::fflush(nullptr);
  ::_exit(static_cast<int>(error.status()));
}

// LibTorch's allocator throws a general error with the number of bytes in its text.
base::RunError from_outside(const std::exception& e) {
  const std::string words = comm::plain_words(e);
  const bool memory = dynamic_cast<const std::bad_alloc*>(&e) != nullptr || words.find("allocate memory") != words.npos;
  if (!memory) return base::RunError(words);
  return base::RunError(
      fmt::format("out of memory ({}): lower [training] local_batch_size or seq_len, or shard over more ranks", words));
}

// What `body` returns; what it throws ends the process.
template <class Body>
base::ExitStatus or_leave(Process& process, int group, const Body& body) {
  try {
    return body();
  } catch (const Turns::Closed&) {
    return base::ExitStatus::failed;  // another rank of this process is about to end it
  } catch (const base::Error& e) {
    leave(process, group, e);
  } catch (const std::exception& e) {
    leave(process, group, from_outside(e));
  }
}

// Group 0's rank on the calling thread, the others on threads of their own. The first status that is not 0.
base::ExitStatus train_all(Process& process, const topology::Layout& layout, const Inputs& inputs) {
  std::vector<base::ExitStatus> statuses(process.ranks.size());
  const auto train_one = [&](int group) {
    statuses[group] = or_leave(process, group, [&] { return train(process, layout, inputs, group); });
  };
  std::vector<std::jthread> others;
  for (int group = 1; group < process.groups(); ++group) {
    others.emplace_back([&, group] {
      base::log_apart();
      base::log_as(fmt::format("rank {}", process.rank(group)));
      set_threads(process.config, process.place);
      train_one(group);
    });
  }
  train_one(0);
  others.clear();  // joins them
  const auto ended = [](base::ExitStatus status) { return status == base::ExitStatus::ok; };
  const auto first = std::find_if_not(statuses.begin(), statuses.end(), ended);
  return first == statuses.end() ? base::ExitStatus::ok : *first;
}

}  // namespace

base::ExitStatus run_ranks(const config::Config& config, const control::Place& place, int virtual_groups) {
  control::die_with_parent();
  base::log_as(fmt::format("rank {}", place.rank));
  count_tensor_memory();
  Process process(config, place, virtual_groups);
  return or_leave(process, 0, [&] {
    const topology::Layout layout = config::validate(config, process.world());
    if (!config.comm.interface.empty()) comm::require_interface(config.comm.interface);
    set_threads(config, place);
    at::set_num_interop_threads(1);
    if (config.comm.backend == config::BackendChoice::nccl) process.ranks[0].device = comm::gpu_of(place.local_rank);
    const Inputs inputs = open_inputs(config);
    join(process, layout);
    const base::ExitStatus status = train_all(process, layout, inputs);
    if (process.host) process.host->finish(kLastWordsS);
    return status;
  });
}

}  // namespace fedshard::train
