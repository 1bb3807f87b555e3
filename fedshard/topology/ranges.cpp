#include "fedshard/topology/ranges.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "fedshard/base/error.h"

namespace fedshard::topology {
namespace {

struct Holder {
  int rank = 0;
  Range slice;
};

// The ranks of `group` whose slices meet `range`, in the order of their slices; for naive those of one replica.
std::vector<Holder> holders_of(const Layout& layout, int group, std::int64_t numel, Range range, Scheme scheme,
                               int replica) {
  const GroupShape& shape = layout.group(group);
  const bool paired = scheme == Scheme::naive;
  const std::int64_t shard_numel = (numel + shape.shards - 1) / shape.shards;
  std::vector<Holder> holders;
  for (std::int64_t f = range.begin / shard_numel; f < shape.shards && f * shard_numel < range.end; ++f) {
    for (int r = paired ? replica : 0; r < (paired ? replica + 1 : shape.replicas); ++r) {
      const int shard = static_cast<int>(f);
      const Range slice = slice_range(numel, shape, r, shard, scheme);
      if (slice.size() > 0 && slice.begin < range.end && slice.end > range.begin) {
        holders.push_back({layout.rank_of(group, r, shard), slice});
      }
    }
  }
  return holders;
}

int holder_at(const std::vector<Holder>& holders, std::int64_t element) {
  for (const Holder& holder : holders) {
    if (holder.slice.begin <= element && element < holder.slice.end) return holder.rank;
  }
  base::fail<base::RunError>("internal error: no rank holds element {}", element);
}

// Cuts what `rank` brings of one bucket of one unit.
void append_parts(const Layout& layout, const BucketPiece& piece, std::int64_t numel, Scheme scheme, int replica,
                  std::vector<ExchangePart>& parts) {
  const Range mine = piece.range;
  std::vector<std::vector<Holder>> holders;
  std::set<std::int64_t> cuts{mine.begin, mine.end};
  for (int group = 0; group < layout.groups(); ++group) {
    holders.push_back(holders_of(layout, group, numel, mine, scheme, replica));
    for (const Holder& holder : holders.back()) {
      cuts.insert(std::clamp(holder.slice.begin, mine.begin, mine.end));
      cuts.insert(std::clamp(holder.slice.end, mine.begin, mine.end));
    }
  }
  for (auto cut = cuts.begin(); std::next(cut) != cuts.end(); ++cut) {
    const Range elementary{*cut, *std::next(cut)};
    std::vector<int> ranks;
    for (const auto& of_group : holders) ranks.push_back(holder_at(of_group, elementary.begin));
    for (int owner = 0; owner < layout.groups(); ++owner) {
      const Range part = part_of(elementary, owner, layout.groups());
      if (part.size() > 0) parts.push_back({piece.unit, part, owner, ranks, piece.bucket});
    }
  }
}

}  // namespace

Range part_of(Range range, std::int64_t i, std::int64_t parts) {
  return {range.begin + range.size() * i / parts, range.begin + range.size() * (i + 1) / parts};
}

Range shard_range(std::int64_t numel, std::int64_t shards, std::int64_t f) {
  const std::int64_t shard_numel = (numel + shards - 1) / shards;
  return {std::min(f * shard_numel, numel), std::min((f + 1) * shard_numel, numel)};
}

Range slice_range(std::int64_t numel, const GroupShape& shape, int replica, int shard, Scheme scheme) {
  const Range whole = shard_range(numel, shape.shards, shard);
  if (scheme == Scheme::naive) return whole;
  if (scheme == Scheme::split) return part_of(whole, replica, shape.replicas);
  const int leader = shard % shape.replicas;
  return {replica <= leader ? whole.begin : whole.end, replica < leader ? whole.begin : whole.end};
}

std::vector<BucketPiece> cut_into_buckets(const Buckets& buckets, std::span<const std::int64_t> unit_numel,
                                          std::span<const Range> held) {
  std::vector<BucketPiece> pieces;
  std::int64_t before = 0;  // elements of the units before
  for (std::size_t u = 0; u < unit_numel.size(); before += unit_numel[u++]) {
    const int unit = static_cast<int>(u);
    for (Range rest = held[u]; rest.size() > 0;) {
      Range piece = rest;
      std::int64_t bucket = buckets.by == Buckets::By::unit ? unit : 0;
      if (buckets.by == Buckets::By::size) {
        bucket = (before + rest.begin) / buckets.numel;
        piece.end = std::min(rest.end, (bucket + 1) * buckets.numel - before);
      }
      pieces.push_back({bucket, unit, piece});
      rest.begin = piece.end;
    }
  }
  return pieces;
}

std::int64_t bucket_count(const Buckets& buckets, std::span<const std::int64_t> unit_numel) {
  if (buckets.by == Buckets::By::whole) return 1;
  if (buckets.by == Buckets::By::unit) return static_cast<std::int64_t>(unit_numel.size());
  const std::int64_t numel = std::accumulate(unit_numel.begin(), unit_numel.end(), std::int64_t{0});
  return (numel + buckets.numel - 1) / buckets.numel;
}

std::vector<ExchangePart> exchange_parts(const Layout& layout, std::span<const std::int64_t> unit_numel, int rank,
                                         const ExchangeRules& rules) {
  const Coordinates at = layout.at(rank);
  std::vector<Range> mine;
  for (const std::int64_t numel : unit_numel) {
    mine.push_back(slice_range(numel, layout.group(at.group), at.replica, at.shard, rules.scheme));
  }
  std::vector<ExchangePart> parts;
  for (const BucketPiece& piece : cut_into_buckets(rules.buckets, unit_numel, mine)) {
    append_parts(layout, piece, unit_numel[static_cast<std::size_t>(piece.unit)], rules.scheme, at.replica, parts);
  }
  return parts;
}

}  // namespace fedshard::topology
