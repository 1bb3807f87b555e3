// The communicators of one rank: one along each axis of the layout, and one over its group.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fedshard/comm/communicator.h"
#include "fedshard/topology/layout.h"

namespace fedshard::comm {

struct Axes {
  std::unique_ptr<Communicator> shard;       // the ranks that hold one copy of the model together
  std::unique_ptr<Communicator> replica;     // the ranks of the group that hold the same shard
  std::unique_ptr<Communicator> group;       // the whole group; small control values
  std::unique_ptr<Communicator> federation;  // topology::Layout::federation_peers, some ranks of each group
  std::vector<int> group_members;            // of each group one member of the federation axis: its index there
};

// A few numbers that are alike on all ranks of a group, by group. Collective over the world; blocks.
std::vector<std::vector<double>> collect_by_group(const Axes& axes, std::span<const double> values);
// Their sum in group order, the same bits everywhere.
void sum_over_groups(const Axes& axes, std::span<double> values);
// The sum over all ranks of the world of numbers that differ between ranks.
void sum_over_world(const Axes& axes, std::span<double> values);

// Called by every rank of the world. `suffix` ends the communicators' names, which must differ where a rank has several
// sets of axes.
Axes make_axes(const topology::Layout& layout, int rank, const Connect& connect, const std::string& suffix = "");
// The same with rings over the messages of `backend`. `counter` must outlive the axes.
Axes make_axes(const topology::Layout& layout, int rank, Backend& backend, TrafficCounter& counter,
               const Watcher& watcher = nullptr);

// Rings over the messages of `backend`; it and `counter` must outlive what is connected.
Connect connect_over_messages(Backend& backend, TrafficCounter& counter, Watcher watcher);

// group_of[rank], for a TrafficCounter.
std::vector<int> groups_by_rank(const topology::Layout& layout);

}  // namespace fedshard::comm
