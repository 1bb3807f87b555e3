#include "fedshard/bench/aggregate_rank.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <thread>

#include "fedshard/base/file.h"
#include "fedshard/comm/gloo.h"
#include "fedshard/comm/plain_words.h"
#include "fedshard/control/launch.h"
#include "fedshard/train/open_store.h"
#include "fedshard/train/tensor_memory.h"

namespace fedshard::bench {
namespace {

constexpr std::chrono::milliseconds kDeadline = std::chrono::minutes(5);  // of a message; no exchange takes as long

void measure(const AggregateOptions& options, const topology::Layout& layout, const control::Place& place,
             const std::filesystem::path& csv) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  at::set_num_threads(std::max(1, cores / place.local_size.value_or(place.world_size)));
  train::count_tensor_memory();
  const auto store = train::open_store(place, kDeadline);
  comm::TrafficCounter traffic(comm::groups_by_rank(layout));
  const auto backend =
      comm::make_gloo_backend(store, {"", comm::address_towards(place.master_address, place.master_port), kDeadline});
  comm::Axes axes = comm::make_axes(layout, place.rank, *backend, traffic);
  std::vector<int> all(static_cast<std::size_t>(layout.world()));
  std::iota(all.begin(), all.end(), 0);
  const auto world = comm::connect_over_messages(*backend, traffic, nullptr)({"world", all, place.rank});
  const auto print = [&](const std::string& line) {
    if (place.rank != 0) return;
    fmt::print("{}", line);
    std::fflush(stdout);
  };
  std::string rows = csv_header();
  print(table_header());
  measure_aggregates(options, layout, axes, *world, traffic, [&](const AggregateRow& row) {
    print(table_line(row));
    rows += csv_line(row);
  });
  if (place.rank == 0 && !csv.empty()) base::write_file_atomically(csv, rows);
  world->collect(std::vector<double>{0});  // nobody leaves, and takes its connections along, before all are done
}

[[noreturn]] void leave(const std::string& words, base::ExitStatus status) {
  fmt::print(stderr, "fedshard: {}\n", words);
  std::fflush(nullptr);
  ::_exit(static_cast<int>(status));
}

}  // namespace

base::ExitStatus run_aggregate_rank(const AggregateOptions& options, const topology::Layout& layout,
                                    const control::Place& place, const std::filesystem::path& csv) {
  try {
    control::die_with_parent();
    measure(options, layout, place, csv);
  } catch (const base::Error& e) {
    leave(fmt::format("rank {}: {}", place.rank, e.what()), e.status());
  } catch (const std::exception& e) {
    leave(fmt::format("rank {}: {}", place.rank, comm::plain_words(e)), base::ExitStatus::failed);
  }
  return base::ExitStatus::ok;
}

}  // namespace fedshard::bench
