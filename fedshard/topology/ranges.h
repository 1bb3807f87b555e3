// Who exchanges which elements with whom at a round: half-open ranges of element indices, integers only.
//
// In each group the ranks that hold shard f split it by replica, so every rank brings one slice. The slices of all
// groups cut a unit into elementary ranges; each of those is held by exactly one rank of every group and is split once
// more into one part a group, which that group *owns*: its rank sums the part and returns the result. With equal groups
// the holders are the twins; with unequal shard counts the same code finds the intersections.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "fedshard/topology/layout.h"

namespace fedshard::topology {

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;  // one past the last
  std::int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Part `i` of `range` cut as evenly as whole elements allow. Parts may be empty.
Range part_of(Range range, std::int64_t i, std::int64_t parts);

// The elements of a unit of `numel` that shard `f` of `shards` really holds (its padding left out).
Range shard_range(std::int64_t numel, std::int64_t shards, std::int64_t f);

// The slice of that which replica `r` of `replicas` brings to a round.
Range slice_range(std::int64_t numel, const GroupShape& shape, int replica, int shard);

struct ExchangePart {
  int unit = 0;
  Range range;               // elements of the unit; never empty
  int owner = 0;             // the group that sums it
  std::vector<int> holders;  // the rank that holds it, by group
};

// All parts that `rank` holds, in ascending order of unit and range. unit_numel[u]: elements of unit u.
std::vector<ExchangePart> exchange_parts(const Layout& layout, std::span<const std::int64_t> unit_numel, int rank);

}  // namespace fedshard::topology
