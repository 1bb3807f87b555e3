#include "fedshard/control/place.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/base/parse.h"
#include "fedshard/control/host_list.h"

namespace fedshard::control {
namespace {

using base::fail;
using base::UsageError;

constexpr std::int64_t kTorchrunPort = 29500;
// Slurm numbers the shells that are not tasks (batch, interactive, extern) from the top of 32 bits.
constexpr std::int64_t kFirstSpecialStep = 0xfffffff0;
// Below the range that Linux hands out by itself (from 32768).
constexpr std::int64_t kFirstDerivedPort = 10'000, kDerivedPorts = 20'000;

std::int64_t parse_number(const std::string& name, const std::string& text) {
  const auto value = base::parse_number<std::int64_t>(text);
  if (!value || *value < 0) {
    fail<UsageError>("the environment variable {} is '{}', which is not a number from 0", name, text);
  }
  return *value;
}

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = environment_(name);
    return value && value->empty() ? std::nullopt : value;
  }
  bool has(const std::string& name) const { return text(name).has_value(); }
  std::optional<int> number(const std::string& name) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const std::int64_t n = parse_number(name, *value);
    if (n > INT32_MAX) fail<UsageError>("the environment variable {} is {}, which is too large", name, n);
    return static_cast<int>(n);
  }
  std::optional<std::int64_t> long_number(const std::string& name) const {
    const auto value = text(name);
    return value ? std::optional(parse_number(name, *value)) : std::nullopt;
  }
  int needed(const std::string& name, std::string_view because) const {
    const auto value = number(name);
    if (!value) {
      fail<UsageError>("the environment variable {} is set but {} is not: set both or neither", because, name);
    }
    return *value;
  }

 private:
  const Environment& environment_;
};

void check(const Place& place) {
  if (place.rank >= place.world_size) {
    fail<UsageError>("{}'s variables say rank {} of a world of {}: a rank is below the world's size", place.source,
                     place.rank, place.world_size);
  }
  if (place.local_rank && place.local_size && *place.local_rank >= *place.local_size) {
    fail<UsageError>("{}'s variables say local rank {} of {} on this node: a local rank is below the node's number",
                     place.source, *place.local_rank, *place.local_size);
  }
  if (place.local_size && *place.local_size > place.world_size) {
    fail<UsageError>("{}'s variables say {} ranks on this node of a world of {}", place.source, *place.local_size,
                     place.world_size);
  }
}

std::optional<Place> from_torchrun(const Variables& variables) {
  if (!variables.has("RANK")) return std::nullopt;
  Place place;
  place.rank = variables.needed("RANK", "RANK");
  place.world_size = variables.needed("WORLD_SIZE", "RANK");
  place.local_rank = variables.needed("LOCAL_RANK", "RANK");
  place.local_size = variables.number("LOCAL_WORLD_SIZE");
  place.coordinator = variables.text("FEDSHARD_COORDINATOR").value_or("");
  place.run_token = variables.text("FEDSHARD_RUN_TOKEN").value_or("");
  if (place.coordinator.empty() != place.run_token.empty()) {
    fail<UsageError>("of the environment variables FEDSHARD_COORDINATOR and FEDSHARD_RUN_TOKEN only {} is set",
                     place.run_token.empty() ? "FEDSHARD_COORDINATOR" : "FEDSHARD_RUN_TOKEN");
  }
  place.source = place.coordinator.empty() ? "torchrun" : "fedshard";
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    if (!variables.has(name)) fail<UsageError>("the environment variable RANK is set but {} is not", name);
  }
  return place;
}

// The entries of "2(x3),1": 2 2 2 1.
std::vector<int> tasks_per_node(const std::string& name, const std::string& text) {
  std::vector<int> tasks;
  const auto bad = [&]() {
    fail<UsageError>("the environment variable {} is '{}', which is no list like 2(x3),1", name, text);
  };
  std::string_view rest = text;
  while (true) {
    int count = 0, times = 1;
    auto parsed = std::from_chars(rest.data(), rest.data() + rest.size(), count);
    if (parsed.ec != std::errc{} || count < 1) bad();
    rest.remove_prefix(static_cast<std::size_t>(parsed.ptr - rest.data()));
    if (rest.starts_with("(x")) {
      parsed = std::from_chars(rest.data() + 2, rest.data() + rest.size(), times);
      if (parsed.ec != std::errc{} || times < 1 || times > 1'000'000) bad();
      rest.remove_prefix(static_cast<std::size_t>(parsed.ptr - rest.data()));
      if (!rest.starts_with(')')) bad();
      rest.remove_prefix(1);
    }
    tasks.insert(tasks.end(), static_cast<std::size_t>(times), count);
    if (rest.empty()) return tasks;
    if (!rest.starts_with(',')) bad();
    rest.remove_prefix(1);
  }
}

std::optional<int> slurm_local_size(const Variables& variables) {
  const auto node = variables.number("SLURM_NODEID");
  for (const std::string name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    const auto text = variables.text(name);
    if (!text || !node) continue;
    const auto tasks = tasks_per_node(name, *text);
    if (static_cast<std::size_t>(*node) >= tasks.size()) {
      fail<UsageError>("SLURM_NODEID is {}, but {} ('{}') speaks of {} nodes", *node, name, *text, tasks.size());
    }
    return tasks[static_cast<std::size_t>(*node)];
  }
  return variables.number("SLURM_NTASKS_PER_NODE");
}

// srun alone starts ranks. The shell of sbatch carries SLURM_PROCID=0 and SLURM_NTASKS as well, but no step, or one of
// the special numbers: whoever types `fedshard train` there has started one process, not a world.
std::optional<Place> from_slurm(const Variables& variables) {
  const auto job =
      variables.text("SLURM_JOB_ID") ? variables.long_number("SLURM_JOB_ID") : variables.long_number("SLURM_JOBID");
  const auto step = variables.long_number("SLURM_STEP_ID");
  if (!step || *step >= kFirstSpecialStep) return std::nullopt;
  if (!job) fail<UsageError>("the environment variable SLURM_STEP_ID is set but SLURM_JOB_ID is not");
  Place place;
  place.source = "Slurm";
  place.rank = variables.needed("SLURM_PROCID", "SLURM_STEP_ID");
  const auto step_tasks = variables.number("SLURM_STEP_NUM_TASKS");
  place.world_size = step_tasks ? *step_tasks : variables.needed("SLURM_NTASKS", "SLURM_PROCID");
  place.local_rank = variables.needed("SLURM_LOCALID", "SLURM_PROCID");
  place.local_size = slurm_local_size(variables);
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    const auto hosts = expand_hosts(variables.text(name).value_or(""));
    if (hosts.empty()) continue;
    place.master_address = hosts.front();
    break;
  }
  // Steps of one job may run side by side; the prime keeps their ports apart.
  place.master_port = static_cast<int>(kFirstDerivedPort + (*job % kDerivedPorts + *step * 7919) % kDerivedPorts);
  return place;
}

// Ranks of one mpirun share its name space, and two mpiruns on a node differ in it.
int mpi_port(const Variables& variables) {
  const auto name_space = variables.text("PMIX_NAMESPACE");
  if (!name_space) return kTorchrunPort;
  std::uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : *name_space) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return static_cast<int>(kFirstDerivedPort + hash % kDerivedPorts);
}

std::optional<Place> from_open_mpi(const Variables& variables) {
  if (!variables.has("OMPI_COMM_WORLD_RANK") && !variables.has("OMPI_COMM_WORLD_SIZE")) return std::nullopt;
  Place place;
  place.source = "Open MPI";
  place.rank = variables.needed("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  place.world_size = variables.needed("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
  place.local_rank = variables.needed("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK");
  place.local_size = variables.needed("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK");
  place.master_port = mpi_port(variables);
  return place;
}

std::optional<Place> from_pmi(const Variables& variables) {
  const bool pmi = variables.has("PMI_RANK") || variables.has("PMI_SIZE");
  if (!pmi && !variables.has("PMIX_RANK")) return std::nullopt;
  Place place;
  place.source = "PMI";
  if (pmi) {
    place.rank = variables.needed("PMI_RANK", "PMI_SIZE");
    place.world_size = variables.needed("PMI_SIZE", "PMI_RANK");
  } else {  // PMIx tells the size only to those who speak it
    place.rank = variables.needed("PMIX_RANK", "PMIX_RANK");
    place.world_size = variables.needed("WORLD_SIZE", "PMIX_RANK");
  }
  place.local_rank = variables.number("MPI_LOCALRANKID");
  place.local_size = variables.number("MPI_LOCALNRANKS");
  place.master_port = mpi_port(variables);
  return place;
}

std::optional<Place> from_launcher(const Variables& variables) {
  if (auto place = from_torchrun(variables)) return place;
  const auto slurm = from_slurm(variables);
  const auto open_mpi = from_open_mpi(variables);
  if (slurm && open_mpi && slurm->world_size != open_mpi->world_size) return open_mpi;
  if (slurm) return slurm;
  return open_mpi ? open_mpi : from_pmi(variables);
}

// Some scripts export a part of torchrun's variables beside another launcher's. Right ones do no harm.
void check_leftovers(const Variables& variables, const std::optional<Place>& place) {
  const auto compare = [&](const char* name, std::optional<int> stated) {
    const auto value = variables.number(name);
    if (!value) return;
    if (!place) fail<UsageError>("the environment variable {} is set but RANK is not: set both or neither", name);
    if (stated && *stated != *value) {
      fail<UsageError>("the environment variable {} is {}, but {}'s variables say {}: unset {}", name, *value,
                       place->source, *stated, name);
    }
  };
  compare("WORLD_SIZE", place ? std::optional(place->world_size) : std::nullopt);
  compare("LOCAL_RANK", place ? place->local_rank : std::nullopt);
  compare("LOCAL_WORLD_SIZE", place ? place->local_size : std::nullopt);
}

}  // namespace

std::optional<std::string> process_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

std::optional<Place> place_from_environment(const Environment& environment) {
  const Variables variables(environment);
  auto place = from_launcher(variables);
  check_leftovers(variables, place);
  if (!place) return place;
  check(*place);
  if (const auto address = variables.text("MASTER_ADDR")) place->master_address = *address;
  if (const auto port = variables.number("MASTER_PORT")) place->master_port = *port;
  if (place->master_port < 1 || place->master_port > 65535) {
    fail<UsageError>("the environment variable MASTER_PORT is {}, which is not a port (1 to 65535)",
                     place->master_port);
  }
  if (place->master_address.empty()) {
    const bool one_node = place->world_size == 1 || (place->local_size && *place->local_size == place->world_size);
    if (!one_node) {
      fail<UsageError>("{}'s variables do not say where rank 0 is: set MASTER_ADDR to the name of its node",
                       place->source);
    }
    place->master_address = "127.0.0.1";
  }
  return place;
}

std::string describe(const Place& place) {
  std::string local;
  if (place.local_rank) local = fmt::format(", local rank {}", *place.local_rank);
  if (place.local_rank && place.local_size) local += fmt::format(" of {}", *place.local_size);
  return fmt::format("rank {} of {}{}, store at {}:{} (from {}'s variables)", place.rank, place.world_size, local,
                     place.master_address, place.master_port, place.source);
}

}  // namespace fedshard::control
