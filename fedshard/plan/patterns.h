// Patterns over the names of parameters, as in a shell: *, ? and [...], where * matches dots too.
#pragma once
#include <string>
#include <vector>

#include "fedshard/plan/units.h"

namespace fedshard::plan {

bool matches_any(const std::vector<std::string>& patterns, const std::string& name);

// Throws UsageError where a pattern matches no parameter of the model, naming it and one that there is.
void require_matches(const ModelPlan& plan, const std::vector<std::string>& patterns);

}  // namespace fedshard::plan
