#include "fedshard/plan/freeze.h"

#include <algorithm>

#include "fedshard/plan/patterns.h"

namespace fedshard::plan {
namespace {

// The parameters of `unit` that are `frozen`, with their places and origins in it.
UnitSpec part_of(const UnitSpec& unit, std::int64_t global_begin, const std::vector<bool>& is_frozen, bool frozen) {
  UnitSpec part{unit.name + (frozen ? ", frozen" : ""), {}, frozen};
  for (int p = 0; p < static_cast<int>(unit.parameters.size()); ++p) {
    if (is_frozen[p] != frozen) continue;
    part.parameters.push_back(unit.parameters[p]);
    part.places.push_back(p);
    part.origins.push_back(global_begin + unit.offset_of(p));
  }
  return part;
}

}  // namespace

ModelPlan freeze(const ModelPlan& plan, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return plan;
  require_matches(plan, patterns);
  ModelPlan result{{}, plan.stages};
  std::vector<std::vector<int>> parts;  // of each unit of `plan`, in the result
  std::int64_t global_begin = 0;
  for (const UnitSpec& unit : plan.units) {
    std::vector<bool> is_frozen;
    for (const ParameterSpec& parameter : unit.parameters) {
      is_frozen.push_back(matches_any(patterns, parameter.name));
    }
    parts.emplace_back();
    for (const bool frozen : {false, true}) {
      if (std::find(is_frozen.begin(), is_frozen.end(), frozen) == is_frozen.end()) continue;
      parts.back().push_back(static_cast<int>(result.units.size()));
      result.units.push_back(part_of(unit, global_begin, is_frozen, frozen));
    }
    global_begin += unit.numel();
  }
  for (StageSpec& stage : result.stages) {
    std::vector<int> units;
    for (const int unit : stage.units) units.insert(units.end(), parts[unit].begin(), parts[unit].end());
    stage.units = std::move(units);
  }
  result.validate();
  return result;
}

}  // namespace fedshard::plan
