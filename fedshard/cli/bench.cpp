#include "fedshard/cli/bench.h"

#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/bench/aggregate_rank.h"
#include "fedshard/comm/store.h"
#include "fedshard/control/launch.h"
#include "fedshard/control/place.h"
#include "fedshard/control/ports.h"
#include "fedshard/model/dims.h"
#include "fedshard/plan/llama_units.h"

namespace fedshard::cli {
namespace {

using base::fail;
using base::UsageError;

constexpr const char* kLoopback = "127.0.0.1";
constexpr int kRanks = 4;

// The value of a name, of those that there are.
template <class T>
T named(const char* option, const std::string& text, const std::vector<std::pair<std::string, T>>& all) {
  std::vector<std::string> names;
  for (const auto& [name, value] : all) {
    if (name == text) return value;
    names.push_back(name);
  }
  fail<UsageError>("{} has no '{}': it is one of {}", option, text, fmt::join(names, ", "));
}

bench::AggregateOptions options_of(const BenchAggregateArgs& args) {
  bench::AggregateOptions options;
  options.plan = args.units.empty() ? plan::llama_plan(model::preset(args.model)) : plan::plan_of_units(args.units);
  for (const std::string& text : args.schemes) {
    using topology::Scheme;
    options.schemes.push_back(named<Scheme>(
        "--schemes", text, {{"split", Scheme::split}, {"leader", Scheme::leader}, {"naive", Scheme::naive}}));
  }
  for (const std::string& text : args.buckets) options.buckets.push_back(topology::buckets_of(text));
  for (const int concurrency : args.concurrency) {
    if (concurrency < 1) fail<UsageError>("--concurrency counts from 1, not {}", concurrency);
    options.concurrency.push_back(concurrency);
  }
  for (const std::string& text : args.dtypes) {
    options.dtypes.push_back(named<at::ScalarType>("--dtypes", text, {{"fp32", at::kFloat}, {"bf16", at::kBFloat16}}));
  }
  if (args.repeat < 1) fail<UsageError>("--repeat counts from 1, not {}", args.repeat);
  options.repeat = args.repeat;
  return options;
}

topology::NumberOrList one_or_list(const std::vector<int>& numbers) {
  if (numbers.size() == 1) return numbers.front();
  return numbers;
}

topology::Layout layout_of(const BenchAggregateArgs& args, const bench::AggregateOptions& options, int world) {
  topology::Layout layout =
      topology::Layout::make(world, {one_or_list(args.groups), one_or_list(args.shard), topology::rest_of_group});
  for (const topology::Scheme scheme : options.schemes) topology::check_scheme(scheme, layout);
  return layout;
}

std::vector<std::string> words_of(const BenchAggregateArgs& args) {
  std::vector<std::string> words = {"bench", "aggregate"};
  const auto add = [&](const char* option, const auto& values) {
    words.push_back(fmt::format("{}={}", option, fmt::join(values, ",")));
  };
  add("--groups", args.groups);
  add("--shard", args.shard);
  add("--model", std::vector<std::string>{args.model});
  if (!args.units.empty()) add("--units", args.units);
  add("--schemes", args.schemes);
  add("--buckets", args.buckets);
  add("--concurrency", args.concurrency);
  add("--dtypes", args.dtypes);
  add("--repeat", std::vector<int>{args.repeat});
  if (!args.csv.empty()) add("--csv", std::vector<std::string>{args.csv});
  return words;
}

// A folder that goes with the object.
class Scratch {
 public:
  Scratch() : path_(std::filesystem::temp_directory_path() / fmt::format("fedshard-bench-{}", ::getpid())) {}
  ~Scratch() {
    std::error_code ignored;  // what is left there is in nobody's way
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Every replica has its parameters, and an exchange brings as many.
void check_memory(const bench::AggregateOptions& options, const topology::Layout& layout) {
  std::int64_t replicas = 0;
  for (int group = 0; group < layout.groups(); ++group) replicas += layout.group(group).replicas;
  const double needed = 2.0 * sizeof(float) * static_cast<double>(options.plan.numel()) * static_cast<double>(replicas);
  if (needed > static_cast<double>(control::memory_bytes())) {
    fail<UsageError>("{} replicas of {:.3g} elements take at least {:.3g} GiB, and this machine has {}", replicas,
                     static_cast<double>(options.plan.numel()), needed / (1 << 30), control::memory_bytes() >> 30);
  }
}

int launch_ranks(const BenchAggregateArgs& args, const topology::Layout& layout) {
  control::ListeningSocket socket = control::listen_on(kLoopback, 0);
  const int port = socket.port();
  const auto store = comm::Store::serve(socket.release(), kLoopback, port, std::chrono::minutes(5));
  const Scratch scratch;
  control::LocalLaunch launch;
  launch.arguments = words_of(args);
  launch.group_sizes = layout.sizes();
  launch.master_address = kLoopback;
  launch.master_port = port;
  launch.coordinator = launch.run_token = "none";  // but whoever has them knows that we serve the store
  launch.environment["OMP_WAIT_POLICY"] = "passive";
  launch.output_folder = scratch.path();
  const control::LaunchResult result = control::run_local(launch);
  if (!result.message.empty()) fmt::print(stderr, "fedshard: {}\n", result.message);
  return result.status;
}

}  // namespace

int bench_aggregate(const BenchAggregateArgs& args) {
  const bench::AggregateOptions options = options_of(args);
  const auto place = args.ranks ? std::nullopt : control::place_from_environment(control::process_environment);
  const topology::Layout layout = layout_of(args, options, place ? place->world_size : args.ranks.value_or(kRanks));
  const std::filesystem::path folder = std::filesystem::path(args.csv).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder)) {
    fail<UsageError>("--csv {}: there is no folder {}", args.csv, folder.string());
  }
  // Written whole under another name first, which would take the place of a pipe, a device or a link.
  const auto kind = std::filesystem::symlink_status(args.csv).type();
  if (!args.csv.empty() && kind != std::filesystem::file_type::not_found &&
      kind != std::filesystem::file_type::regular) {
    fail<UsageError>("--csv {}: that is no regular file", args.csv);
  }
  ::signal(SIGPIPE, SIG_IGN);  // a peer that has died is an error to tell, not to die of
  if (place) return static_cast<int>(bench::run_aggregate_rank(options, layout, *place, args.csv));
  control::check_memory(layout.world());
  check_memory(options, layout);
  return launch_ranks(args, layout);
}

}  // namespace fedshard::cli
