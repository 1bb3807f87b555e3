#include "fedshard/train/rank.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

#include "fedshard/base/log.h"
#include "fedshard/comm/gloo.h"
#include "fedshard/comm/nccl.h"
#include "fedshard/comm/plain_words.h"
#include "fedshard/comm/store.h"
#include "fedshard/control/launch.h"
#include "fedshard/control/ports.h"
#include "fedshard/train/host.h"
#include "fedshard/train/tensor_memory.h"
#include "fedshard/train/trainer.h"
#include "fedshard/train/version.h"

namespace fedshard::train {
namespace {

constexpr const char* kEndpointKey = "fedshard/coordinator";
constexpr const char* kTokenKey = "fedshard/run_token";
constexpr double kVerdictS = 4;     // how long it waits, where it failed itself, for what the others have to say
constexpr double kLastWordsS = 60;  // how long rank 0 waits for the others' last words where it hosts the coordinator

std::chrono::milliseconds timeout_of(const Config& config) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(config.comm.timeout_s * 1000));
}

// torchrun's agent serves a store at MASTER_ADDR:MASTER_PORT itself, unless told not to.
bool agent_serves_store() {
  const auto flag = control::process_environment("TORCHELASTIC_USE_AGENT_STORE");
  return flag && (*flag == "True" || *flag == "1");
}

void set_threads(const Config& config, const control::Place& place) {
  int threads = config.training.threads;
  if (threads == 0) {
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    threads = std::max(1, cores / place.local_size.value_or(place.world_size));
  }
  at::set_num_threads(threads);
  at::set_num_interop_threads(1);
}

// Everything that connects this process to the others, in the order in which it must be taken down (last first).
struct Connections {
  std::shared_ptr<comm::Store> store;
  std::unique_ptr<RunHost> host;  // where this process hosts the coordinator
  std::unique_ptr<control::CoordinatorClient> coordinator;
  std::unique_ptr<comm::TrafficCounter> traffic;
  std::unique_ptr<comm::Backend> backend;
  at::Device device = at::kCPU;  // that computes
  comm::Axes axes;
  // For rounds with a delay, which run beside training: what they exchange is the host's.
  std::unique_ptr<comm::TrafficCounter> round_traffic;
  std::optional<comm::Axes> round_axes;
};

std::shared_ptr<comm::Store> open_store(const Config& config, const control::Place& place) {
  const bool served_elsewhere = !place.coordinator.empty() || place.rank != 0 || agent_serves_store();
  if (served_elsewhere) return comm::Store::connect(place.master_address, place.master_port, timeout_of(config));
  control::ListeningSocket socket = control::listen_on(place.master_address, place.master_port);
  const int port = socket.port();
  return comm::Store::serve(socket.release(), place.master_address, port, timeout_of(config));
}

std::unique_ptr<control::CoordinatorClient> join_coordinator(const Config& config, const topology::Layout& layout,
                                                             const control::Place& place, comm::Store& store) {
  const bool from_store = place.coordinator.empty();  // else our launcher has put both into the environment
  control::ClientOptions options{.endpoint = from_store ? store.get(kEndpointKey) : place.coordinator,
                                 .token = control::RunToken::parse(from_store ? store.get(kTokenKey) : place.run_token),
                                 .rank = place.rank,
                                 .group = layout.group_of(place.rank),
                                 .version = versions().at("fedshard"),
                                 .config_digest = fmt::format("{}# {}\n", resolved_toml(config), layout.describe()),
                                 .on_abort = nullptr,
                                 // Time for the main thread to report by itself, where it is not stuck in a collective.
                                 .exit_on_abort_s = 1.0};
  return std::make_unique<control::CoordinatorClient>(std::move(options));
}

void connect(const Config& config, const topology::Layout& layout, const control::Place& place, Connections& to) {
  to.store = open_store(config, place);
  const std::string address = comm::address_towards(place.master_address, place.master_port);
  if (place.coordinator.empty() && place.rank == 0) {
    to.host =
        std::make_unique<RunHost>(config, layout, config.comm.interface.empty() ? address : config.comm.interface);
    to.store->set(kEndpointKey, to.host->endpoint());
    to.store->set(kTokenKey, to.host->run_token());
  }
  to.coordinator = join_coordinator(config, layout, place, *to.store);
  base::log_to_file(metrics::RunFolder(config.metrics.folder).log(place.rank));
  to.traffic = std::make_unique<comm::TrafficCounter>(comm::groups_by_rank(layout));
  to.backend = comm::make_gloo_backend(to.store, {config.comm.interface, address, timeout_of(config)});
  const comm::Watcher watcher = [client = to.coordinator.get()](const std::string& what) {
    client->begin_collective(what);
  };
  comm::Connect connect = comm::connect_over_messages(*to.backend, *to.traffic, watcher);
  if (config.comm.backend == BackendChoice::nccl) {
    connect = comm::connect_over_nccl(to.store, {to.device, timeout_of(config), connect}, *to.traffic, watcher);
  }
  to.axes = comm::make_axes(layout, place.rank, connect);
  if (config.federation.delay == 0 || layout.groups() == 1) return;
  to.round_traffic = std::make_unique<comm::TrafficCounter>(comm::groups_by_rank(layout));
  to.round_axes = comm::make_axes(
      layout, place.rank, comm::connect_over_messages(*to.backend, *to.round_traffic, watcher), ", beside training");
}

base::ExitStatus train(const Config& config, const topology::Layout& layout, const control::Place& place,
                       const Inputs& inputs, Connections& connections) {
  const base::SteadyClock clock;
  std::unique_ptr<metrics::Trace> trace;
  if (config.metrics.trace) {
    trace = std::make_unique<metrics::Trace>(metrics::RunFolder(config.metrics.folder).trace(place.rank), place.rank,
                                             clock);
  }
  base::ExitStatus status{};
  {
    Connections& c = connections;
    Trainer trainer({config, layout, place.rank, inputs, c.axes, *c.traffic, c.round_axes ? *c.round_axes : c.axes,
                     c.round_traffic ? *c.round_traffic : *c.traffic, *c.coordinator, trace.get(), c.device});
    status = trainer.run();
  }
  if (trace) trace->close();
  connections.coordinator->goodbye(static_cast<int>(status));
  if (connections.host) connections.host->finish(kLastWordsS);
  return status;
}

[[noreturn]] void leave(const control::Place& place, const Connections& connections, const base::Error& error) {
  if (connections.coordinator) {  // before, the log is standard error, where it would stand twice
    base::log_error("{}", error.what());
    connections.coordinator->report_error(error.what(), static_cast<int>(error.status()));
  }
  int speaker = place.rank;
  std::string text = error.what();
  if (connections.host) {
    connections.host->finish(kVerdictS);
    // Where this rank only noticed that others were gone, it tells what the coordinator knows of the cause.
    const auto cause = connections.host->status().first_error;
    if (cause && cause->rank >= 0 && error.status() == base::ExitStatus::peers_lost) {
      speaker = cause->rank;
      text = cause->message;
    }
  }
  const std::string name = fmt::format("rank {}", speaker);
  const bool names_itself = text.starts_with(name + ":") || text.starts_with(name + " ");
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

}  // namespace

base::ExitStatus run_rank(const Config& config, const control::Place& place) {
  control::die_with_parent();
  base::log_as(fmt::format("rank {}", place.rank));
  count_tensor_memory();
  Connections connections;
  try {
    const topology::Layout layout = validate(config, place.world_size);
    if (!config.comm.interface.empty()) comm::require_interface(config.comm.interface);
    set_threads(config, place);
    if (config.comm.backend == BackendChoice::nccl) connections.device = comm::gpu_of(place.local_rank);
    const Inputs inputs = open_inputs(config);
    connect(config, layout, place, connections);
    const std::string where = fmt::format("{}; {}", control::describe(place), layout.describe());
    base::log_info("{}", where);
    if (place.rank == 0) {
      for (const std::string& warning : warnings_of(config)) base::log_info("warning: {}", warning);
    }
    // Our own launcher has said so already; under another one it is worth knowing whom we believed.
    if (connections.host) std::fprintf(stderr, "fedshard: %s\n", where.c_str());
    return train(config, layout, place, inputs, connections);
  } catch (const base::Error& e) {
    leave(place, connections, e);
  } catch (const std::exception& e) {
    leave(place, connections, from_outside(e));
  }
}

}  // namespace fedshard::train
