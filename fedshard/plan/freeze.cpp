#include "fedshard/plan/freeze.h"

#include "fedshard/plan/patterns.h"
#include "fedshard/plan/split.h"

namespace fedshard::plan {

ModelPlan freeze(const ModelPlan& plan, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return plan;
  require_matches(plan, patterns);
  ModelPlan result = split_units(
      plan, [&](const UnitSpec&, const ParameterSpec& parameter) { return matches_any(patterns, parameter.name); },
      [](UnitSpec& unit) {
        unit.name += ", frozen";
        unit.frozen = true;
        unit.group_local = false;
      });
  result.validate();
  return result;
}

}  // namespace fedshard::plan
