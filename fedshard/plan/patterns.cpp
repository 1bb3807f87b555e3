#include "fedshard/plan/patterns.h"

#include <fnmatch.h>

#include <algorithm>

#include "fedshard/base/error.h"

namespace fedshard::plan {

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0; });
}

void require_matches(const ModelPlan& plan, const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    const bool used = std::any_of(plan.units.begin(), plan.units.end(), [&](const UnitSpec& unit) {
      return std::any_of(unit.parameters.begin(), unit.parameters.end(),
                         [&](const ParameterSpec& parameter) { return matches_any({pattern}, parameter.name); });
    });
    if (used) continue;
    base::fail<base::UsageError>("the pattern '{}' matches no parameter of the model; its names are like '{}'", pattern,
                                 plan.units.back().parameters.back().name);
  }
}

}  // namespace fedshard::plan
