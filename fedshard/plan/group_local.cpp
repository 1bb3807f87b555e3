#include "fedshard/plan/group_local.h"

#include "fedshard/base/error.h"
#include "fedshard/plan/patterns.h"
#include "fedshard/plan/split.h"

namespace fedshard::plan {

ModelPlan keep_in_groups(const ModelPlan& plan, const ExchangePatterns& patterns) {
  const auto& [include, exclude] = patterns;
  if (include.empty() && exclude.empty()) return plan;
  require_matches(plan, include);
  require_matches(plan, exclude);
  ModelPlan result = split_units(
      plan,
      [&](const UnitSpec& unit, const ParameterSpec& parameter) {
        const bool included = include.empty() || matches_any(include, parameter.name);
        return !unit.frozen && !(included && !matches_any(exclude, parameter.name));
      },
      [](UnitSpec& unit) {
        unit.name += ", group-local";
        unit.group_local = true;
      });
  if (result.exchanged_numel() == 0) {
    base::fail<base::UsageError>("no parameter that trains is left for rounds to exchange");
  }
  result.validate();
  return result;
}

}  // namespace fedshard::plan
