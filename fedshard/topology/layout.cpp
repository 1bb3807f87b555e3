#include "fedshard/topology/layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "fedshard/base/error.h"

namespace fedshard::topology {
namespace {

using base::fail;
using base::UsageError;

std::vector<int> sizes_of_groups(int world, const NumberOrList& groups) {
  if (const int* count = std::get_if<int>(&groups)) {
    if (*count < 1) fail<UsageError>("groups must be at least 1, not {}", *count);
    if (*count > world) fail<UsageError>("{} ranks cannot be split into {} groups", world, *count);
    if (world % *count != 0) {
      fail<UsageError>("{} ranks cannot be split into {} equal groups ({} left over); give their sizes as a list",
                       world, *count, world % *count);
    }
    return std::vector<int>(static_cast<std::size_t>(*count), world / *count);
  }
  const auto& sizes = std::get<std::vector<int>>(groups);
  if (sizes.empty()) fail<UsageError>("the list of group sizes is empty");
  for (const int size : sizes) {
    if (size < 1)
      fail<UsageError>("a group must have at least 1 rank, not {} (groups of {})", size, fmt::join(sizes, ", "));
  }
  const auto sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (sum != world) {
    fail<UsageError>("{} ranks cannot be split into groups of {} (sum {})", world, fmt::join(sizes, " and "), sum);
  }
  return sizes;
}

// One degree by group, each positive or rest_of_group.
std::vector<int> degrees(const NumberOrList& degree, std::size_t groups, const char* what) {
  std::vector<int> by_group;
  if (const int* number = std::get_if<int>(&degree)) {
    by_group.assign(groups, *number);
  } else {
    by_group = std::get<std::vector<int>>(degree);
  }
  if (by_group.size() != groups) {
    fail<UsageError>("the {} degree lists {} numbers for {} groups; give one by group", what, by_group.size(), groups);
  }
  for (const int number : by_group) {
    if (number < 1 && number != rest_of_group) {
      fail<UsageError>("the {} degree must be at least 1, or -1 for what is left of the group, not {}", what, number);
    }
  }
  return by_group;
}

std::string counted(int n, const char* noun) { return fmt::format("{} {}{}", n, noun, n == 1 ? "" : "s"); }

GroupShape shape_of(int first_rank, int ranks, int shards, int replicas, std::size_t group) {
  if (shards == rest_of_group && replicas == rest_of_group) {
    fail<UsageError>("the shard degree and the replicate degree of group {} are both -1; give one of them", group);
  }
  if (shards > 0 && ranks % shards != 0) {
    fail<UsageError>("a group of {} ranks cannot have {} shards: {} does not divide {} (group {})", ranks, shards,
                     shards, ranks, group);
  }
  if (replicas > 0 && ranks % replicas != 0) {
    fail<UsageError>("a group of {} ranks cannot have {} replicas: {} does not divide {} (group {})", ranks, replicas,
                     replicas, ranks, group);
  }
  if (shards == rest_of_group) shards = ranks / replicas;
  if (replicas == rest_of_group) replicas = ranks / shards;
  const std::int64_t used = std::int64_t{shards} * replicas;
  if (used != ranks) {
    fail<UsageError>("a group of {} ranks cannot be {} of {} ({} ranks); set one degree to -1 (group {})", ranks,
                     counted(replicas, "replica"), counted(shards, "shard"), used, group);
  }
  return {first_rank, ranks, shards, replicas};
}

std::string inside(const GroupShape& shape) {
  return counted(shape.replicas, "replica") + " x " + counted(shape.shards, "shard");
}

}  // namespace

Layout Layout::make(int world, const LayoutOptions& options) {
  if (world < 1) fail<UsageError>("a run needs at least 1 rank, not {}", world);
  const auto sizes = sizes_of_groups(world, options.groups);
  const auto shards = degrees(options.shard_degree, sizes.size(), "shard");
  const auto replicas = degrees(options.replicate_degree, sizes.size(), "replicate");
  Layout layout;
  for (std::size_t g = 0; g < sizes.size(); ++g) {
    layout.shapes_.push_back(shape_of(layout.world(), sizes[g], shards[g], replicas[g], g));
    layout.group_of_.insert(layout.group_of_.end(), static_cast<std::size_t>(sizes[g]), static_cast<int>(g));
  }
  return layout;
}

const GroupShape& Layout::group(int group) const {
  base::require(group >= 0 && group < groups(), "group {} of {}", group, groups());
  return shapes_[static_cast<std::size_t>(group)];
}

std::vector<int> Layout::sizes() const {
  std::vector<int> sizes;
  for (const auto& shape : shapes_) sizes.push_back(shape.ranks);
  return sizes;
}

int Layout::group_of(int rank) const {
  base::require(rank >= 0 && rank < world(), "rank {} of {}", rank, world());
  return group_of_[static_cast<std::size_t>(rank)];
}

Coordinates Layout::at(int rank) const {
  const int g = group_of(rank);
  const auto& shape = group(g);
  const int local = rank - shape.first_rank;
  return {g, local / shape.shards, local % shape.shards, local};
}

int Layout::rank_of(int group_index, int replica, int shard) const {
  const auto& shape = group(group_index);
  base::require(replica >= 0 && replica < shape.replicas, "replica {} of {}", replica, shape.replicas);
  base::require(shard >= 0 && shard < shape.shards, "shard {} of {}", shard, shape.shards);
  return shape.first_rank + replica * shape.shards + shard;
}

std::vector<int> Layout::shard_peers(int rank) const {
  const auto here = at(rank);
  std::vector<int> peers;
  for (int f = 0; f < group(here.group).shards; ++f) peers.push_back(rank_of(here.group, here.replica, f));
  return peers;
}

std::vector<int> Layout::replica_peers(int rank) const {
  const auto here = at(rank);
  std::vector<int> peers;
  for (int r = 0; r < group(here.group).replicas; ++r) peers.push_back(rank_of(here.group, r, here.shard));
  return peers;
}

std::vector<int> Layout::group_peers(int rank) const {
  const auto& shape = group(group_of(rank));
  std::vector<int> peers(static_cast<std::size_t>(shape.ranks));
  std::iota(peers.begin(), peers.end(), shape.first_rank);
  return peers;
}

std::vector<int> Layout::federation_peers(int rank) const {
  const auto here = at(rank);
  std::vector<int> peers;
  for (int other = 0; other < world(); ++other) {
    const auto there = at(other);
    if (equal_shards() && there.shard != here.shard) continue;
    if (equal_groups() && there.replica != here.replica) continue;
    peers.push_back(other);
  }
  return peers;
}

bool Layout::equal_shards() const {
  return std::all_of(shapes_.begin(), shapes_.end(),
                     [&](const GroupShape& s) { return s.shards == shapes_.front().shards; });
}

bool Layout::equal_groups() const {
  return equal_shards() && std::all_of(shapes_.begin(), shapes_.end(),
                                       [&](const GroupShape& s) { return s.replicas == shapes_.front().replicas; });
}

std::string Layout::strategy() const {
  const auto all = [&](auto&& holds) { return std::all_of(shapes_.begin(), shapes_.end(), holds); };
  const std::string inner = all([](const GroupShape& s) { return s.shards == 1; })     ? "ddp"
                            : all([](const GroupShape& s) { return s.replicas == 1; }) ? "fsdp"
                                                                                       : "hsdp";
  return groups() == 1 ? inner : "fl+" + inner;
}

std::string Layout::describe() const {
  const std::string head = fmt::format("{}: {} = {}", strategy(), counted(world(), "rank"), counted(groups(), "group"));
  if (equal_groups()) return fmt::format("{} x {}", head, inside(shapes_.front()));
  std::vector<std::string> parts;
  for (const auto& shape : shapes_) parts.push_back(fmt::format("{} ({})", shape.ranks, inside(shape)));
  return fmt::format("{} of {}", head, fmt::join(parts, ", "));
}

}  // namespace fedshard::topology
