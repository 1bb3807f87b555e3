#include "fedshard/plan/split.h"

#include <algorithm>
#include <utility>

namespace fedshard::plan {
namespace {

// The parameters of `unit` on the side `side`, with their places and origins.
UnitSpec part_of(const UnitSpec& unit, std::int64_t global_begin, const std::vector<bool>& is_apart, bool side) {
  UnitSpec part = unit;
  part.parameters.clear();
  part.places.clear();
  part.origins.clear();
  for (int p = 0; p < static_cast<int>(unit.parameters.size()); ++p) {
    if (is_apart[p] != side) continue;
    part.parameters.push_back(unit.parameters[p]);
    part.places.push_back(unit.places.empty() ? p : unit.places[p]);
    part.origins.push_back(unit.origins.empty() ? global_begin + unit.offset_of(p) : unit.origins[p]);
  }
  return part;
}

}  // namespace

ModelPlan split_units(const ModelPlan& plan,
                      const std::function<bool(const UnitSpec& unit, const ParameterSpec& parameter)>& is_apart,
                      const std::function<void(UnitSpec& unit)>& mark) {
  ModelPlan result{{}, plan.stages};
  std::vector<std::vector<int>> parts;  // of each unit of `plan`, in the result
  std::int64_t global_begin = 0;
  for (const UnitSpec& unit : plan.units) {
    std::vector<bool> sides;
    for (const ParameterSpec& parameter : unit.parameters) sides.push_back(is_apart(unit, parameter));
    parts.emplace_back();
    for (const bool side : {false, true}) {
      if (std::find(sides.begin(), sides.end(), side) == sides.end()) continue;
      parts.back().push_back(static_cast<int>(result.units.size()));
      result.units.push_back(part_of(unit, global_begin, sides, side));
      if (side) mark(result.units.back());
    }
    global_begin += unit.numel();
  }
  for (StageSpec& stage : result.stages) {
    std::vector<int> units;
    for (const int unit : stage.units) units.insert(units.end(), parts[unit].begin(), parts[unit].end());
    stage.units = std::move(units);
  }
  return result;
}

}  // namespace fedshard::plan
