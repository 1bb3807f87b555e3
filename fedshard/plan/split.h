// Splitting units: what is said of some of a unit's parameters (frozen, group-local) becomes true of whole units.
//
// The surprising part: the parts of a unit take no part of its stage with them. The stage uses all of them together and
// sees the same parameters in the same places as before, and elements keep their global index.
#pragma once
#include <functional>

#include "fedshard/plan/units.h"

namespace fedshard::plan {

// `plan` in which every unit is on one side of `is_apart`: one with parameters on both has become two neighbours, the
// rest first. `mark` is called once for each unit of parameters that are apart. A plan that was split before may be
// split again.
ModelPlan split_units(const ModelPlan& plan,
                      const std::function<bool(const UnitSpec& unit, const ParameterSpec& parameter)>& is_apart,
                      const std::function<void(UnitSpec& unit)>& mark);

}  // namespace fedshard::plan
