#include "fedshard/topology/ranges.h"

#include <algorithm>
#include <set>

#include "fedshard/base/error.h"

namespace fedshard::topology {
namespace {

struct Holder {
  int rank = 0;
  Range slice;
};

// The ranks of `group` whose slices meet `range`, in the order of their slices.
std::vector<Holder> holders_of(const Layout& layout, int group, std::int64_t numel, Range range) {
  const GroupShape& shape = layout.group(group);
  const std::int64_t shard_numel = (numel + shape.shards - 1) / shape.shards;
  std::vector<Holder> holders;
  for (std::int64_t f = range.begin / shard_numel; f < shape.shards && f * shard_numel < range.end; ++f) {
    for (int r = 0; r < shape.replicas; ++r) {
      const int shard = static_cast<int>(f);
      const Range slice = slice_range(numel, shape, r, shard);
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

void append_parts_of_unit(const Layout& layout, int unit, std::int64_t numel, int rank,
                          std::vector<ExchangePart>& parts) {
  const Coordinates at = layout.at(rank);
  const Range mine = slice_range(numel, layout.group(at.group), at.replica, at.shard);
  if (mine.size() == 0) return;
  std::vector<std::vector<Holder>> holders;
  std::set<std::int64_t> cuts{mine.begin, mine.end};
  for (int group = 0; group < layout.groups(); ++group) {
    holders.push_back(holders_of(layout, group, numel, mine));
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
      if (part.size() > 0) parts.push_back({unit, part, owner, ranks});
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

Range slice_range(std::int64_t numel, const GroupShape& shape, int replica, int shard) {
  return part_of(shard_range(numel, shape.shards, shard), replica, shape.replicas);
}

std::vector<ExchangePart> exchange_parts(const Layout& layout, std::span<const std::int64_t> unit_numel, int rank) {
  std::vector<ExchangePart> parts;
  for (std::size_t unit = 0; unit < unit_numel.size(); ++unit) {
    append_parts_of_unit(layout, static_cast<int>(unit), unit_numel[unit], rank, parts);
  }
  return parts;
}

}  // namespace fedshard::topology
