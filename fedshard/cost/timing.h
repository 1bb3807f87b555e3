// Seconds of a collective on a machine: base + latency of the ring's path + bytes over the narrowest link + lateness.
//
// Additive latency is the form of NCCL's own tuning model (NVIDIA/nccl, src/graph/tuning.cc), whose all-gather and
// reduce-scatter are rings. In a ring whose members send round by round, as ours do over Gloo (comm/ring.h), the
// slowest link decides each round: (n - 1) max(alpha + s / beta); Software::lockstep says which. What is assumed:
// congestion grows with the logarithm of the nodes, and n ranks wait for the latest of n, exponentially distributed,
// H_n times the mean.
#pragma once
#include <cstdint>
#include <functional>
#include <span>

#include "fedshard/cost/machine.h"

namespace fedshard::cost {

// 1 + 1/2 + ... + 1/n, the mean of the largest of n exponentially distributed numbers of mean 1.
double harmonic(std::int64_t n);

// Where a ring of ranks runs: hops from each member to the next, but from the last to the first.
struct Path {
  std::int64_t members = 1;
  std::int64_t node_hops = 0, network_hops = 0, cell_hops = 0;
  std::int64_t nodes = 1;     // that it touches
  std::int64_t per_node = 1;  // members on the node that has fewest
};
Path path_of(std::span<const int> ranks, const Placement& placement);

// Bytes a second that each member passes on; `rings`: such rings beside each other, which share the links of cells.
double bandwidth_of(const Path& path, const Machine& machine, std::int64_t rings = 1);

// Of a network of so many nodes, what is left of its bandwidth: eta_0 (1 - delta min(1, log2(nodes) / doublings)).
double network_efficiency(const Machine& machine, std::int64_t nodes);

// `late`: seconds by which the latest of n ranks comes; by default the mean, jitter times H_n. A ring of one takes
// nothing. `passes`: 1 (all-gather, reduce-scatter), 2 (all-reduce); `part_bytes` is what a rank passes on in a round.
using Lateness = std::function<double(std::int64_t n)>;
double ring_seconds(const Path& path, const Machine& machine, int passes, double part_bytes, std::int64_t rings = 1,
                    const Lateness& late = nullptr);

struct Link {
  double latency = 0, bytes_per_s = 0;
};
// (n - 1) max(alpha + s / beta) over the links of the ring.
double lockstep_seconds(std::int64_t n, double part_bytes, std::span<const Link> links);

}  // namespace fedshard::cost
