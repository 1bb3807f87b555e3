#include "fedshard/shard/arena.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "fedshard/base/error.h"

namespace fedshard::shard {

ArenaMap::ArenaMap(const plan::ModelPlan& plan, int shards, int shard, ArenaRoom room, at::Device device)
    : shards_(shards), shard_(shard), device_(device) {
  for (const plan::UnitSpec& unit : plan.units) {
    const bool held = room == ArenaRoom::every_unit || !unit.frozen;
    const std::int64_t taken = held ? unit.arena_numel(shards) : 0;
    const bool shares = room == ArenaRoom::one_trained_unit;
    offsets_.push_back(shares ? 0 : total_);
    shard_numel_.push_back(held ? unit.shard_numel(shards) : 0);
    ranges_.push_back(held ? topology::shard_range(unit.numel(), shards, shard) : topology::Range{});
    group_local_.push_back(unit.group_local);
    if (ranges_.back().size() > 0) pieces_.push_back({units() - 1, ranges_.back(), offsets_.back()});
    total_ = shares ? std::max(total_, taken) : total_ + taken;
  }
}

ArenaMap::ArenaMap(const ArenaMap& whole, const std::vector<std::vector<topology::Range>>& kept)
    : shards_(whole.shards_),
      shard_(whole.shard_),
      device_(whole.device_),
      whole_(false),
      shard_numel_(whole.shard_numel_),
      ranges_(whole.ranges_),
      group_local_(whole.group_local_) {
  base::require(static_cast<int>(kept.size()) == whole.units(), "ranges of {} units for {} units", kept.size(),
                whole.units());
  for (int u = 0; u < units(); ++u) {
    std::int64_t end = ranges_[u].begin;
    for (const topology::Range& range : kept[u]) {
      base::require(end <= range.begin && range.begin < range.end && range.end <= ranges_[u].end,
                    "elements {}..{} of unit {} cannot be kept after {}", range.begin, range.end, u, end);
      pieces_.push_back({u, range, total_});
      total_ += range.size();
      end = range.end;
    }
  }
}

std::int64_t ArenaMap::offset(int unit) const {
  base::require(whole_, "an arena of parts of units has no place for all of unit {}", unit);
  return offsets_[unit];
}

std::int64_t ArenaMap::real_numel() const {
  std::int64_t numel = 0;
  for (const ArenaPiece& piece : pieces_) numel += piece.range.size();
  return numel;
}

ArenaMap ArenaMap::on(at::Device device) const {
  ArenaMap moved = *this;
  moved.device_ = device;
  return moved;
}

Arena::Arena(const ArenaMap& map, at::ScalarType dtype)
    : map_(&map), flat_(at::zeros({map.numel()}, at::TensorOptions().dtype(dtype).device(map.device()))) {}

at::Tensor Arena::unit(int unit) const { return flat_.narrow(0, map_->offset(unit), map_->shard_numel(unit)); }

at::Tensor Arena::real(int unit) const { return flat_.narrow(0, map_->offset(unit), map_->range(unit).size()); }

at::Tensor Arena::slice(int unit, topology::Range range) const {
  if (range.size() == 0) return flat_.narrow(0, 0, 0);
  const auto& pieces = map_->pieces();
  const auto piece = std::find_if(pieces.begin(), pieces.end(), [&](const ArenaPiece& p) {
    return p.unit == unit && p.range.begin <= range.begin && range.end <= p.range.end;
  });
  base::require(piece != pieces.end(), "elements {}..{} of unit {} do not lie in one piece of this arena", range.begin,
                range.end, unit);
  return flat_.narrow(0, piece->offset + range.begin - piece->range.begin, range.size());
}

}  // namespace fedshard::shard
