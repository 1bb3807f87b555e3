#include "fedshard/bench/aggregate.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "fedshard/base/clock.h"
#include "fedshard/base/error.h"
#include "fedshard/base/quantities.h"
#include "fedshard/federation/exchange.h"
#include "fedshard/train/tensor_memory.h"

namespace fedshard::bench {
namespace {

const char* name_of(at::ScalarType dtype) { return dtype == at::kFloat ? "fp32" : "bf16"; }

// Sets each element of the arena, by its global index.
void fill(const plan::ModelPlan& plan, const shard::Arena& arena, const std::function<float(std::int64_t)>& value) {
  for (int u = 0; u < arena.map().units(); ++u) {
    const topology::Range held = arena.map().range(u);
    const at::Tensor values = at::empty({held.size()}, at::kFloat);
    for (const plan::GlobalRun& run : plan.global_runs(u, held)) {
      float* out = values.mutable_data_ptr<float>() + (run.range.begin - held.begin);
      for (std::int64_t i = 0; i < run.range.size(); ++i) out[i] = value(run.index + i);
    }
    arena.real(u).copy_(values);
  }
}

// Exact: values have 8 bits, and weights few more than there are groups.
float mean_of_groups(std::int64_t index, const std::vector<double>& weights) {
  double sum = 0;
  for (std::size_t g = 0; g < weights.size(); ++g) sum += weights[g] * value_of(index, static_cast<int>(g));
  return static_cast<float>(sum);
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t upper = values.size() / 2, lower = (values.size() - 1) / 2;
  return (values[lower] + values[upper]) / 2;
}

// Of all ranks, the most of each number. They go on together.
std::vector<double> most_of(comm::Communicator& world, const std::vector<double>& mine) {
  std::vector<double> most = mine;
  for (const auto& of_rank : world.collect(mine)) {
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], of_rank[i]);
  }
  return most;
}

}  // namespace

std::vector<AggregateCase> cases_of(const AggregateOptions& options) {
  std::vector<AggregateCase> cases;
  for (const at::ScalarType dtype : options.dtypes) {
    for (const topology::Scheme scheme : options.schemes) {
      for (const topology::Buckets& buckets : options.buckets) {
        if (buckets.by == topology::Buckets::By::whole) {
          cases.push_back({{scheme, buckets, 1}, dtype});
          continue;
        }
        for (const int concurrency : options.concurrency) cases.push_back({{scheme, buckets, concurrency}, dtype});
      }
    }
  }
  return cases;
}

float value_of(std::int64_t global_index, int group) {
  // One round of a multiplicative hash, so that neighbours and groups have nothing in common.
  const auto mixed = (static_cast<std::uint64_t>(global_index) * 2 + 1) * 0x9e3779b97f4a7c15U *
                     static_cast<std::uint64_t>(2 * group + 3);
  return static_cast<float>(static_cast<int>(mixed >> 56) - 128) / 64;
}

std::vector<double> weights_of(int groups) {
  const auto whole = std::bit_ceil(static_cast<unsigned>(2 * groups));
  std::vector<double> weights(static_cast<std::size_t>(groups), 1.0 / whole);
  weights.back() = (whole - static_cast<double>(groups - 1)) / whole;
  return weights;
}

void check_mean(const plan::ModelPlan& plan, int groups, const shard::Arena& mean) {
  const std::vector<double> weights = weights_of(groups);
  const shard::Arena expected(mean.map(), mean.dtype());
  fill(plan, expected, [&](std::int64_t index) { return mean_of_groups(index, weights); });
  for (int u = 0; u < mean.map().units(); ++u) {
    const at::Tensor got = mean.real(u), right = expected.real(u);
    if (got.numel() == 0 || std::memcmp(got.const_data_ptr(), right.const_data_ptr(), got.nbytes()) == 0) continue;
    // Not by values, of which a NaN equals none and -0 equals 0.
    const at::ScalarType bits = mean.dtype() == at::kFloat ? at::kInt : at::kShort;
    const auto first = at::ne(got.view(bits), right.view(bits)).nonzero()[0].item<std::int64_t>();
    base::fail<base::RunError>("the exchange is wrong: element {} of unit '{}' is {} and not {}",
                               mean.map().range(u).begin + first, plan.units[static_cast<std::size_t>(u)].name,
                               got[first].item<float>(), right[first].item<float>());
  }
}

void measure_aggregates(const AggregateOptions& options, const topology::Layout& layout, comm::Axes& axes,
                        comm::Communicator& world, const comm::TrafficCounter& traffic,
                        const std::function<void(const AggregateRow&)>& show) {
  const int rank = world.members().rank();
  const topology::Coordinates at = layout.at(rank);
  const shard::ArenaMap map(options.plan, layout.group(at.group).shards, at.shard);
  const std::vector<double> weights = weights_of(layout.groups());
  const base::SteadyClock clock;
  for (const AggregateCase& what : cases_of(options)) {
    const shard::Arena parameters(map, what.dtype), mean(map, what.dtype);
    fill(options.plan, parameters, [&](std::int64_t index) { return value_of(index, at.group); });
    federation::Exchange exchange(layout, rank, options.plan, map, axes, what.rules);
    const auto aggregate = [&] {
      exchange.write(exchange.gathered_mean_of(parameters, weights, comm::Purpose::aggregate), mean);
    };
    aggregate();
    check_mean(options.plan, layout.groups(), mean);
    AggregateRow row{what};
    std::vector<double> seconds;
    for (int i = 0; i < options.repeat; ++i) {
      most_of(world, {0});  // all begin at once
      const std::int64_t sent = traffic.read().of(comm::Purpose::aggregate);
      const std::int64_t before = train::restart_peak_tensor_bytes();
      const double begin = clock.now();
      aggregate();
      const std::vector<double> most =
          most_of(world, {clock.now() - begin, static_cast<double>(train::peak_tensor_bytes() - before),
                          static_cast<double>(traffic.read().of(comm::Purpose::aggregate) - sent)});
      seconds.push_back(most[0]);
      row.peak_bytes = std::max(row.peak_bytes, static_cast<std::int64_t>(most[1]));
      row.bytes = static_cast<std::int64_t>(most[2]);
    }
    row.seconds = median_of(seconds);
    const auto size = static_cast<double>(options.plan.numel()) * static_cast<double>(c10::elementSize(what.dtype));
    row.gb_per_s = size / row.seconds / 1e9;
    show(row);
  }
}

std::string table_header() {
  return fmt::format("{:<5} {:<7} {:<8} {:>11} {:>10} {:>12} {:>8} {:>12}\n", "dtype", "scheme", "bucket",
                     "concurrency", "seconds", "bytes a rank", "GB/s", "peak memory");
}

std::string table_line(const AggregateRow& row) {
  const topology::ExchangeRules& rules = row.what.rules;
  return fmt::format("{:<5} {:<7} {:<8} {:>11} {:>10.6f} {:>12} {:>8.3f} {:>12}\n", name_of(row.what.dtype),
                     topology::name_of(rules.scheme), topology::text_of(rules.buckets), rules.concurrency, row.seconds,
                     base::human(base::Bytes{row.bytes}), row.gb_per_s, base::human(base::Bytes{row.peak_bytes}));
}

std::string csv_header() { return "dtype,scheme,bucket,concurrency,seconds,bytes,gb_per_s,peak_bytes\n"; }

std::string csv_line(const AggregateRow& row) {
  const topology::ExchangeRules& rules = row.what.rules;
  return fmt::format("{},{},{},{},{:.9f},{},{:.6f},{}\n", name_of(row.what.dtype), topology::name_of(rules.scheme),
                     topology::text_of(rules.buckets), rules.concurrency, row.seconds, row.bytes, row.gb_per_s,
                     row.peak_bytes);
}

}  // namespace fedshard::bench
