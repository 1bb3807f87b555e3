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

// What an arena has room for.
enum class ArenaRoom {
  every_unit,
  trained_units,     // frozen units have no elements in it
  one_trained_unit,  // the units share one place, each to be used before the next one's values come
};

// A run of elements of a unit that lies in an arena.
struct ArenaPiece {
  int unit = 0;
  topology::Range range;    // elements of the unit; never empty
  std::int64_t offset = 0;  // of the first, in elements of the arena
  bool operator==(const ArenaPiece&) const = default;
};

// Where each unit's shard, or parts of it, lie in an arena of one rank.
class ArenaMap {
 public:
  ArenaMap(const plan::ModelPlan& plan, int shards, int shard, ArenaRoom room = ArenaRoom::every_unit,
           at::Device device = at::kCPU);
  // For state that not every element has, as some moments: kept[u] are ascending ranges within whole.range(u). They lie
  // one after another without gaps. offset(), and an arena's unit() and real(), are refused.
  ArenaMap(const ArenaMap& whole, const std::vector<std::vector<topology::Range>>& kept);
  // Everything that lies in the arena, in ascending order of unit and range. In a whole one a unit has at most one.
  const std::vector<ArenaPiece>& pieces() const { return pieces_; }
  bool is_whole() const { return whole_; }
  int units() const { return static_cast<int>(ranges_.size()); }
  std::int64_t numel() const { return total_; }                            // with the gaps
  std::int64_t offset(int unit) const;                                     // in elements
  std::int64_t shard_numel(int unit) const { return shard_numel_[unit]; }  // ceil(N_u / F), with padding
  topology::Range range(int unit) const { return ranges_[unit]; }          // elements of the unit, without padding
  std::int64_t real_numel() const;                                         // over all pieces, without padding
  bool group_local(int unit) const { return group_local_[unit]; }          // plan::UnitSpec's
  int shards() const { return shards_; }
  int shard() const { return shard_; }
  at::Device device() const { return device_; }  // of the arenas made from this map
  ArenaMap on(at::Device device) const;          // the same places on another device

 private:
  int shards_, shard_;
  at::Device device_;
  bool whole_ = true;
  std::int64_t total_ = 0;
  std::vector<std::int64_t> offsets_, shard_numel_;
  std::vector<topology::Range> ranges_;
  std::vector<bool> group_local_;
  std::vector<ArenaPiece> pieces_;
};

// An arena, zero at first. `map` must outlive it.
class Arena {
 public:
  explicit Arena(const ArenaMap& map, at::ScalarType dtype = at::kFloat);
  const ArenaMap& map() const { return *map_; }
  at::ScalarType dtype() const { return flat_.scalar_type(); }
  const at::Tensor& flat() const { return flat_; }  // [map.numel()]
  at::Tensor unit(int unit) const;                  // [shard_numel(unit)], a view
  at::Tensor real(int unit) const;                  // [range(unit).size()], a view without the padding
  // The elements [range.begin, range.end) of the unit, which must lie in one piece (or be none); a view.
  at::Tensor slice(int unit, topology::Range range) const;

 private:
  const ArenaMap* map_;
  at::Tensor flat_;
};

}  // namespace fedshard::shard
