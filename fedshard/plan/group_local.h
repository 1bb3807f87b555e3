// Group-local parameters: those that every group trains for itself and no round exchanges.
//
// The surprising part: they are units of their own, as frozen ones are (plan/split.h). So digests, outer state,
// compression and messages leave them out without knowing of any parameter's name. Groups start with the same values of
// them, as of all others; from the first step on they differ.
#pragma once
#include <string>
#include <vector>

#include "fedshard/plan/units.h"

namespace fedshard::plan {

// Patterns (plan/patterns.h) of what rounds exchange: a parameter that trains is exchanged when it matches `include`,
// or that is empty, and does not match `exclude`.
struct ExchangePatterns {
  std::vector<std::string> include, exclude;
};

// `plan` with all other parameters that train group-local; frozen ones stay frozen. Throws UsageError for a pattern
// that matches no parameter, and where none is left to exchange.
ModelPlan keep_in_groups(const ModelPlan& plan, const ExchangePatterns& patterns);

}  // namespace fedshard::plan
