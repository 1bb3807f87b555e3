// Who exchanges which elements with whom at a round: half-open ranges of element indices, integers only.
//
// In each group the ranks that hold shard f share it by replica (scheme.h), so every rank brings one slice, which may
// be empty. The slices of all groups cut a unit into elementary ranges; each of those is held by one rank of every
// group and is split once more into one part a group, which that group *owns*: its rank sums the part and returns the
// result. With equal groups the holders are the twins; with unequal shard counts the same code finds the intersections.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "fedshard/topology/layout.h"
#include "fedshard/topology/scheme.h"

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
Range slice_range(std::int64_t numel, const GroupShape& shape, int replica, int shard, Scheme scheme = Scheme::split);

// A run of elements that lies in one bucket.
struct BucketPiece {
  std::int64_t bucket = 0;
  int unit = 0;
  Range range;  // never empty
};

// held[u] (of unit u, which has unit_numel[u] elements) cut where buckets end, in ascending order of bucket, unit and
// range.
std::vector<BucketPiece> cut_into_buckets(const Buckets& buckets, std::span<const std::int64_t> unit_numel,
                                          std::span<const Range> held);
// How many buckets the model has, some of which may be empty.
std::int64_t bucket_count(const Buckets& buckets, std::span<const std::int64_t> unit_numel);

struct ExchangePart {
  int unit = 0;
  Range range;               // elements of the unit; never empty
  int owner = 0;             // the group that sums it
  std::vector<int> holders;  // the rank that brings it, by group
  std::int64_t bucket = 0;   // that it lies in
};

// All parts that `rank` brings, in ascending order of bucket, unit and range. unit_numel[u]: elements of unit u.
// check_scheme(rules.scheme, layout) must hold.
std::vector<ExchangePart> exchange_parts(const Layout& layout, std::span<const std::int64_t> unit_numel, int rank,
                                         const ExchangeRules& rules = {});

}  // namespace fedshard::topology
