// A model as the plan sees it: units of parameters, and the stages that use them. Integers only, no torch.
//
// A *unit* is what is gathered, reduced and released together. A *stage* is one computation of the forward pass with
// one unit's parameters. The surprising part: they are not the same list. Tied embedding and head are ONE unit (with
// the final norm) that two stages use, the first and the last, so their gradients sum in one buffer and are reduced
// once.
//
// The *global index* of an element is its place in the concatenation of all units in order, without padding. Initial
// values, exchanges, digests and checkpoints are defined on it, so none of them depends on the layout. Splitting a
// unit (plan/split.h), where it is frozen or group-local in part, leaves every element its global index.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fedshard/topology/ranges.h"

namespace fedshard::plan {

// How a parameter starts: normal(0, std) from a counter-based generator, or a constant.
struct Initializer {
  enum class Kind { normal, constant };
  Kind kind = Kind::normal;
  double value = 0.02;  // the standard deviation, or the constant
};

struct ParameterSpec {
  std::string name;                 // Hugging Face's name, "model.layers.0.self_attn.q_proj.weight"
  std::vector<std::int64_t> shape;  // row-major, as torch.nn.Linear keeps it: [out, in]
  Initializer init;
  std::int64_t numel() const;
  // Weight decay applies to matrices only, not to norms and other vectors.
  bool is_matrix() const { return shape.size() >= 2; }
};

struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
  bool frozen = false;       // has no gradients and no moments, and no group changes it
  bool group_local = false;  // is trained by every group for itself: no round exchanges it
  bool is_exchanged() const { return !frozen && !group_local; }  // at rounds
  // For units of a plan that has been split, else empty: by parameter, its place in what a stage sees of the whole
  // unit, and the global index of its first element.
  std::vector<int> places = {};
  std::vector<std::int64_t> origins = {};
  std::int64_t numel() const;
  // The first element of parameter i within the unit.
  std::int64_t offset_of(int parameter) const;
  // Elements a rank holds and moves: ceil(N_u / F). The last shards may be partly or wholly padding.
  std::int64_t shard_numel(std::int64_t shards) const { return (numel() + shards - 1) / shards; }
  // Elements that a shard takes up in an arena of fp32, with the gap that aligns the next one.
  std::int64_t arena_numel(std::int64_t shards) const;
};

struct StageSpec {
  std::string name;
  std::vector<int> units;  // indices into ModelPlan::units: one, or more where it has been split
  // False where the gradients follow without the parameters' values, as an embedding's do: the unit is then not
  // gathered again for this stage's backward.
  bool backward_reads_parameters = true;
  bool uses(int unit) const;
};

// Neighbouring elements of a unit whose global indices are neighbours too.
struct GlobalRun {
  topology::Range range;   // elements of the unit
  std::int64_t index = 0;  // the global index of the first
  bool operator==(const GlobalRun&) const = default;
};

struct ModelPlan {
  std::vector<UnitSpec> units;
  std::vector<StageSpec> stages;  // in forward order; the first consumes tokens, the last yields the loss
  std::int64_t numel() const;
  std::int64_t exchanged_numel() const;  // at rounds: without frozen and group-local units
  // By unit, 0 of those that are not exchanged: as empty ones they have no part in a round.
  std::vector<std::int64_t> exchanged_numel_by_unit() const;
  // The global index of unit u's first element, of a plan that has not been split.
  std::int64_t global_offset(int unit) const;
  // The elements `held` of the unit in order, never empty runs.
  std::vector<GlobalRun> global_runs(int unit, topology::Range held) const;
  // How many stages read the unit's parameters.
  int stages_of(int unit) const;
  // The first stage that has a unit to train. Backward ends there: nothing before it needs gradients.
  int first_trained_stage() const;
  // Throws UsageError where a unit is empty or unused, a stage names no unit, or a parameter has no elements or a name
  // that another one has, or all are frozen. A unit may be used by one stage, or (tied) by the first and the last.
  void validate() const;
};

// A plan of units of so many elements, one parameter and one stage each. Throws UsageError, naming --units, for none in
// one.
ModelPlan plan_of_units(const std::vector<std::int64_t>& numel);

}  // namespace fedshard::plan
