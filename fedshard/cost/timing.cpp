#include "fedshard/cost/timing.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::cost {

double harmonic(std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = n; i >= 1; --i) sum += 1.0 / static_cast<double>(i);
  return sum;
}

Path path_of(std::span<const int> ranks, const Placement& placement) {
  base::require(!ranks.empty(), "a ring without ranks");
  Path path;
  path.members = std::ssize(ranks);
  std::map<int, std::int64_t> on_node;
  for (const int rank : ranks) ++on_node[placement.node_of(rank)];
  path.nodes = std::ssize(on_node);
  path.per_node = path.members;
  for (const auto& [node, members] : on_node) path.per_node = std::min(path.per_node, members);
  for (std::size_t i = 1; i < ranks.size(); ++i) {
    if (placement.cell_of(ranks[i]) != placement.cell_of(ranks[i - 1])) {
      ++path.cell_hops;
    } else if (placement.node_of(ranks[i]) != placement.node_of(ranks[i - 1])) {
      ++path.network_hops;
    } else {
      ++path.node_hops;
    }
  }
  return path;
}

double network_efficiency(const Machine& machine, std::int64_t nodes) {
  if (nodes <= 1) return 1;
  const double doublings = std::log2(static_cast<double>(nodes)) / machine[Key::congestion_doublings];
  return machine[Key::network_efficiency] * (1 - machine[Key::congestion] * std::min(1.0, doublings));
}

double bandwidth_of(const Path& path, const Machine& machine, std::int64_t rings) {
  if (path.nodes == 1) return machine[Key::node_bandwidth];
  // A ring leaves a node by all the network cards of its members there.
  double bandwidth =
      machine[Key::network_bandwidth] * static_cast<double>(path.per_node) * network_efficiency(machine, path.nodes);
  if (path.cell_hops > 0) bandwidth = std::min(bandwidth, machine[Key::cell_bandwidth] / static_cast<double>(rings));
  return path.node_hops > 0 ? std::min(bandwidth, machine[Key::node_bandwidth]) : bandwidth;
}

namespace {

// Each member sends on one connection.
std::vector<Link> links_of(const Path& path, const Machine& machine, std::int64_t rings) {
  std::vector<Link> links;
  if (path.node_hops > 0) links.push_back({machine[Key::node_latency], machine[Key::node_bandwidth]});
  const double network = machine[Key::network_bandwidth] * network_efficiency(machine, path.nodes);
  if (path.network_hops > 0) links.push_back({machine[Key::network_latency], network});
  if (path.cell_hops > 0) {
    const double share = machine[Key::cell_bandwidth] / static_cast<double>(rings);
    links.push_back({machine[Key::cell_latency], std::min(network, share)});
  }
  return links;
}

}  // namespace

double ring_seconds(const Path& path, const Machine& machine, int passes, double part_bytes, std::int64_t rings,
                    const Lateness& late) {
  if (path.members == 1) return 0;
  const double hops = static_cast<double>(path.members - 1);
  const double latency = static_cast<double>(path.node_hops) * machine[Key::node_latency] +
                         static_cast<double>(path.network_hops) * machine[Key::network_latency] +
                         static_cast<double>(path.cell_hops) * machine[Key::cell_latency];
  const double lateness = late ? late(path.members) : machine[Key::jitter] * harmonic(path.members);
  const double once = machine.software.lockstep
                          ? lockstep_seconds(path.members, part_bytes, links_of(path, machine, rings))
                          : latency + hops * part_bytes / bandwidth_of(path, machine, rings);
  return machine[Key::collective_base] + passes * once + lateness;
}

double lockstep_seconds(std::int64_t n, double part_bytes, std::span<const Link> links) {
  double slowest = 0;
  for (const Link& link : links) slowest = std::max(slowest, link.latency + part_bytes / link.bytes_per_s);
  return static_cast<double>(n - 1) * slowest;
}

}  // namespace fedshard::cost
