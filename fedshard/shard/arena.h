// Arenas: one flat buffer a role (parameters, gradients, each moment), in which every unit's shard is a slice.
//
// Slices are aligned for vector instructions, but the gaps never travel: a collective or an exchange moves exactly the
// ceil(N_u / F) elements of a shard, of which the last shards' tails (or all) are padding and always zero.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "fedshard/plan/units.h"
#include "fedshard/topology/ranges.h"

namespace fedshard::shard {

// Where each unit's shard lies in an arena of one rank.
class ArenaMap {
 public:
  ArenaMap(const plan::ModelPlan& plan, int shards, int shard);
  int units() const { return static_cast<int>(offsets_.size()); }
  std::int64_t numel() const { return total_; }                            // with the gaps
  std::int64_t offset(int unit) const { return offsets_[unit]; }           // in elements
  std::int64_t shard_numel(int unit) const { return shard_numel_[unit]; }  // ceil(N_u / F), with padding
  topology::Range range(int unit) const { return ranges_[unit]; }          // elements of the unit, without padding
  std::int64_t real_numel() const;                                         // over all units, without padding
  int shards() const { return shards_; }
  int shard() const { return shard_; }

 private:
  int shards_, shard_;
  std::int64_t total_ = 0;
  std::vector<std::int64_t> offsets_, shard_numel_;
  std::vector<topology::Range> ranges_;
};

// An arena in fp32, zero at first. `map` must outlive it.
class Arena {
 public:
  explicit Arena(const ArenaMap& map);
  const ArenaMap& map() const { return *map_; }
  const at::Tensor& flat() const { return flat_; }  // [map.numel()]
  at::Tensor unit(int unit) const;                  // [shard_numel(unit)], a view
  at::Tensor real(int unit) const;                  // [range(unit).size()], a view without the padding
  // The elements [range.begin, range.end) of the unit, which this rank must hold; a view.
  at::Tensor slice(int unit, topology::Range range) const;

 private:
  const ArenaMap* map_;
  at::Tensor flat_;
};

}  // namespace fedshard::shard
