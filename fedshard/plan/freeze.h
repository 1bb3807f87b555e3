// Freezing: which parameters of a model are left as they are.
//
// The surprising part: a unit of which only some parameters are frozen becomes two units, one of each kind, that its
// stage uses together (plan/split.h). So a unit is frozen or not, and gradients, moments and messages of frozen
// elements exist nowhere.
#pragma once
#include <string>
#include <vector>

#include "fedshard/plan/units.h"

namespace fedshard::plan {

// `plan` with the parameters frozen whose name matches one of `patterns` (plan/patterns.h). Global indices stay. Throws
// UsageError for a pattern that matches no parameter, and where none is left to train.
ModelPlan freeze(const ModelPlan& plan, const std::vector<std::string>& patterns);

}  // namespace fedshard::plan
