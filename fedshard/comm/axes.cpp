#include "fedshard/comm/axes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/comm/ring.h"

namespace fedshard::comm {
namespace {

std::unique_ptr<Communicator> communicator_of(std::string name, std::vector<int> ranks, int rank,
                                              const Connect& connect) {
  const auto place = std::find(ranks.begin(), ranks.end(), rank);
  base::require(place != ranks.end(), "rank {} is not a member of the {}", rank, name);
  return connect({std::move(name), ranks, static_cast<int>(place - ranks.begin())});
}

}  // namespace

Axes make_axes(const topology::Layout& layout, int rank, const Connect& connect, const std::string& suffix) {
  const auto make = [&](const std::string& name, std::vector<int> ranks) {
    return communicator_of(name + suffix, std::move(ranks), rank, connect);
  };
  const topology::Coordinates at = layout.at(rank);
  Axes axes;
  axes.shard = make(fmt::format("shard axis of group {}, replica {}", at.group, at.replica), layout.shard_peers(rank));
  axes.replica =
      make(fmt::format("replica axis of group {}, shard {}", at.group, at.shard), layout.replica_peers(rank));
  axes.group = make(fmt::format("group {}", at.group), layout.group_peers(rank));
  const std::string which = layout.equal_groups()   ? fmt::format(" of replica {}, shard {}", at.replica, at.shard)
                            : layout.equal_shards() ? fmt::format(" of shard {}", at.shard)
                                                    : "";
  axes.federation = make("federation axis" + which, layout.federation_peers(rank));
  const std::vector<int>& members = axes.federation->members().ranks;
  for (int group = 0; group < layout.groups(); ++group) {
    const auto first = std::find_if(members.begin(), members.end(), [&](int r) { return layout.group_of(r) == group; });
    axes.group_members.push_back(static_cast<int>(first - members.begin()));
  }
  return axes;
}

std::vector<std::vector<double>> collect_by_group(const Axes& axes, std::span<const double> values) {
  const auto all = axes.federation->collect(values);
  std::vector<std::vector<double>> by_group;
  for (const int member : axes.group_members) by_group.push_back(all[member]);
  return by_group;
}

void sum_over_groups(const Axes& axes, std::span<double> values) {
  const auto by_group = collect_by_group(axes, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = 0;
    for (const auto& of_group : by_group) values[i] += of_group[i];
  }
}

void sum_over_world(const Axes& axes, std::span<double> values) {
  axes.group->sum(values);
  sum_over_groups(axes, values);
}

Axes make_axes(const topology::Layout& layout, int rank, Backend& backend, TrafficCounter& counter,
               const Watcher& watcher) {
  return make_axes(layout, rank, connect_over_messages(backend, counter, watcher));
}

Connect connect_over_messages(Backend& backend, TrafficCounter& counter, Watcher watcher) {
  return [&backend, &counter, watcher = std::move(watcher)](Members members) {
    auto transport = members.size() > 1 ? backend.connect(members) : nullptr;
    return make_ring_communicator(std::move(members), std::move(transport), counter, watcher);
  };
}

std::vector<int> groups_by_rank(const topology::Layout& layout) {
  std::vector<int> groups;
  for (int rank = 0; rank < layout.world(); ++rank) groups.push_back(layout.group_of(rank));
  return groups;
}

}  // namespace fedshard::comm
