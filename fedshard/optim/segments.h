// The pieces of a unit's shard that share a weight decay: runs of matrices and runs of vectors.
#pragma once
#include <vector>

#include "fedshard/plan/units.h"
#include "fedshard/topology/ranges.h"

namespace fedshard::optim {

struct Segment {
  topology::Range range;  // elements of the unit, inside the shard
  bool decays = false;
  bool operator==(const Segment&) const = default;
};

// Of the part `held` of the unit, in order, never empty pieces.
std::vector<Segment> segments_of(const plan::UnitSpec& unit, topology::Range held);

}  // namespace fedshard::optim
