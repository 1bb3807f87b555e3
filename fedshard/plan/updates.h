// Which update the inner optimizer makes of each parameter, with what learning rate and weight decay. Torch-free, so
// that configs, memory tables and traffic forecasts know it before any rank starts; the optim room only carries it out.
//
// A surprise: under Muon one model has two optimizers. Muon's update is meant for the hidden layers' matrices;
// embedding, head and all vectors get AdamW's, with the same learning rate.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fedshard/plan/units.h"
#include "fedshard/topology/ranges.h"

namespace fedshard::plan {

enum class Update { none, adamw, sgd, sgd_momentum, muon };  // none: of frozen parameters

// The fp32 numbers kept for each element: 0, 2 (first and second moment), 0, 1 (momentum), 1 (first moment).
int moments_of(Update update);

// Parameters whose learning rate or weight decay differ from the rest's.
struct ParameterGroup {
  std::vector<std::string> params;          // patterns over the parameters' names (plan/patterns.h)
  double lr_factor = 1;                     // of the learning rate
  std::optional<double> weight_decay = {};  // of all that match, vectors too; unset: as if they were in no group
  bool operator==(const ParameterGroup&) const = default;
};

struct UpdateOptions {
  Update update = Update::adamw;            // with muon: of the matrices it is meant for
  double weight_decay = 0;                  // of matrices; vectors have none (the usual practice for Llama)
  std::vector<ParameterGroup> groups = {};  // the first that matches a parameter counts
};

struct UpdateRule {
  Update update = Update::adamw;
  double lr_factor = 1, weight_decay = 0;
  bool operator==(const UpdateRule&) const = default;
};

// By unit and parameter. Throws UsageError naming a pattern that matches no parameter of the model.
using UpdateRules = std::vector<std::vector<UpdateRule>>;
UpdateRules update_rules(const ModelPlan& plan, const UpdateOptions& options);

// Whether Muon orthogonalises the parameter: of two dimensions, in a unit that neither the first nor the last stage
// uses (Jordan's choice, https://kellerjordan.github.io/posts/muon/).
bool is_muon_matrix(const ModelPlan& plan, int unit, int parameter);

// Payload bytes that one step's update sends over one shard axis, all its F ranks together. Muon needs whole
// matrices, so a unit that has some is gathered once in fp32: F (F-1) ceil(N_u/F) 4 bytes. 0 for all other updates.
std::int64_t update_bytes(const ModelPlan& plan, const UpdateRules& rules, std::int64_t shards);

// The elements of each unit, among those that `shard` of `shards` holds, that have at least `moments` moments:
// ascending ranges, none empty, none that touch.
std::vector<std::vector<topology::Range>> moment_ranges(const ModelPlan& plan, const UpdateRules& rules, int moments,
                                                        std::int64_t shards, std::int64_t shard);

// The fewest and the most moments that an element of the model has.
struct MomentCounts {
  int least = 0, most = 0;
};
MomentCounts moment_counts(const UpdateRules& rules);

// The moments of all elements that rounds exchange, each counted.
std::int64_t exchanged_moments(const ModelPlan& plan, const UpdateRules& rules);

// Bytes of the arenas of moments on the rank that has most.
std::int64_t moment_bytes(const ModelPlan& plan, const UpdateRules& rules, std::int64_t shards);

// Bytes of one fp32 buffer that holds the largest trained unit's shard: what an update is computed in where the
// parameters' own arena doesn't serve (optim/workplace.h).
std::int64_t staging_bytes(const ModelPlan& plan, std::int64_t shards);

// Bytes that Muon computes in: the buffer that units are gathered to, F ceil(N_u/F) fp32 of the largest one, which
// stays; and while an m x n matrix (m <= n) is orthogonalised, two of its size and one of m x m in bf16, and what the
// matrix product copies of them, at most one of each. 0 for other updates.
std::int64_t update_workspace_bytes(const ModelPlan& plan, const UpdateRules& rules, std::int64_t shards);

}  // namespace fedshard::plan
