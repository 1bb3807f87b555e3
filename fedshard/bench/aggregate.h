// The exchange of a round in each way there is, side by side: every scheme, size of bucket, number of them under way
// and dtype, on the layout and over the network that ranks really have.
//
// A surprise: the groups' values are made so that their weighted mean is exact in fp32. So there is one right result,
// to the bit, which every rank knows without asking anybody, and each case is held to it before it is timed.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fedshard/comm/axes.h"
#include "fedshard/plan/units.h"
#include "fedshard/shard/arena.h"
#include "fedshard/topology/scheme.h"

namespace fedshard::bench {

struct AggregateOptions {
  plan::ModelPlan plan;
  std::vector<topology::Scheme> schemes;
  std::vector<topology::Buckets> buckets;
  std::vector<int> concurrency;
  std::vector<at::ScalarType> dtypes;  // of parameters: fp32, bf16
  int repeat = 5;                      // timed exchanges of each case
};

struct AggregateCase {
  topology::ExchangeRules rules;
  at::ScalarType dtype = at::kFloat;
};

struct AggregateRow {
  AggregateCase what;
  double seconds = 0;           // median over the repetitions, of the slowest rank
  std::int64_t bytes = 0;       // that a rank sends, of the one that sends most
  double gb_per_s = 0;          // of the whole model's parameters, once, in these seconds; 1 GB = 10^9 bytes
  std::int64_t peak_bytes = 0;  // of tensors beside the parameters, of the rank that needs most
};

// All combinations, dtype by dtype; the whole exchange, which is one bucket, with one at once alone.
std::vector<AggregateCase> cases_of(const AggregateOptions& options);

// A group's values: whole numbers of 64ths, of 8 bits. The weights: positive, sums of powers of two, 1 in all.
float value_of(std::int64_t global_index, int group);
std::vector<double> weights_of(int groups);

// Throws RunError, naming the first element that is wrong, unless the arena holds the groups' weighted mean, rounded
// once.
void check_mean(const plan::ModelPlan& plan, int groups, const shard::Arena& mean);

// Checks and times each case; `show` sees its row as soon as it is known. Collective over `world`, which has all ranks
// of the layout. Peaks need train::count_tensor_memory. Throws what check_mean throws.
void measure_aggregates(const AggregateOptions& options, const topology::Layout& layout, comm::Axes& axes,
                        comm::Communicator& world, const comm::TrafficCounter& traffic,
                        const std::function<void(const AggregateRow&)>& show);

// For people, in aligned columns, and as CSV; a line each, ending with a newline.
std::string table_header();
std::string table_line(const AggregateRow& row);
std::string csv_header();
std::string csv_line(const AggregateRow& row);

}  // namespace fedshard::bench
