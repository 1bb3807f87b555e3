// The communicators of one rank: one along each axis of the layout, and one over its group.
#pragma once
#include <memory>

#include "fedshard/comm/communicator.h"
#include "fedshard/topology/layout.h"

namespace fedshard::comm {

struct Axes {
  std::unique_ptr<Communicator> shard;       // the ranks that hold one copy of the model together
  std::unique_ptr<Communicator> replica;     // the ranks of the group that hold the same shard
  std::unique_ptr<Communicator> group;       // the whole group; small control values
  std::unique_ptr<Communicator> federation;  // the twins: the ranks of the other groups that hold the same slice
};

// Called by every rank of the world. Equal groups only.
Axes make_axes(const topology::Layout& layout, int rank, const Connect& connect);
// The same with rings over the messages of `backend`. `counter` must outlive the axes.
Axes make_axes(const topology::Layout& layout, int rank, Backend& backend, TrafficCounter& counter,
               const Watcher& watcher = nullptr);

// Rings over the messages of `backend`; it and `counter` must outlive what is connected.
Connect connect_over_messages(Backend& backend, TrafficCounter& counter, Watcher watcher);

// group_of[rank], for a TrafficCounter.
std::vector<int> groups_by_rank(const topology::Layout& layout);

}  // namespace fedshard::comm
