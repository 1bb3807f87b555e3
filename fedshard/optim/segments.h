// The pieces of a unit's shard that are updated by one rule: runs of parameters, but each of Muon's matrices for
// itself.
#pragma once
#include <span>
#include <vector>

#include "fedshard/plan/units.h"
#include "fedshard/plan/updates.h"
#include "fedshard/topology/ranges.h"

namespace fedshard::optim {

struct Segment {
  topology::Range range;  // elements of the unit, inside the shard
  int parameter = 0;      // the first one in it
  plan::UpdateRule rule;
  bool operator==(const Segment&) const = default;
};

// Of the part `held` of the unit, in order, never empty pieces. rules[p]: of the unit's parameter p.
std::vector<Segment> segments_of(const plan::UnitSpec& unit, std::span<const plan::UpdateRule> rules,
                                 topology::Range held);

}  // namespace fedshard::optim
