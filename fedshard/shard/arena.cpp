#include "fedshard/shard/arena.h"

#include <ATen/ATen.h>

#include "fedshard/base/error.h"

namespace fedshard::shard {

ArenaMap::ArenaMap(const plan::ModelPlan& plan, int shards, int shard) : shards_(shards), shard_(shard) {
  for (const plan::UnitSpec& unit : plan.units) {
    offsets_.push_back(total_);
    shard_numel_.push_back(unit.shard_numel(shards));
    ranges_.push_back(topology::shard_range(unit.numel(), shards, shard));
    total_ += unit.arena_numel(shards);
  }
}

std::int64_t ArenaMap::real_numel() const {
  std::int64_t numel = 0;
  for (const topology::Range& range : ranges_) numel += range.size();
  return numel;
}

Arena::Arena(const ArenaMap& map) : map_(&map), flat_(at::zeros({map.numel()}, at::kFloat)) {}

at::Tensor Arena::unit(int unit) const { return flat_.narrow(0, map_->offset(unit), map_->shard_numel(unit)); }

at::Tensor Arena::real(int unit) const { return flat_.narrow(0, map_->offset(unit), map_->range(unit).size()); }

at::Tensor Arena::slice(int unit, topology::Range range) const {
  const topology::Range held = map_->range(unit);
  base::require(held.begin <= range.begin && range.end <= held.end, "elements {}..{} of unit {} are not in {}..{}",
                range.begin, range.end, unit, held.begin, held.end);
  return flat_.narrow(0, map_->offset(unit) + range.begin - held.begin, range.size());
}

}  // namespace fedshard::shard
