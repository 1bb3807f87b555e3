// A model as the plan sees it: units of parameters, and the stages that use them. Integers only, no torch.
//
// A *unit* is what is gathered, reduced and released together. A *stage* is one computation of the forward pass with
// one unit's parameters. The surprising part: they are not the same list. Tied embedding and head are ONE unit (with
// the final norm) that two stages use, the first and the last, so their gradients sum in one buffer and are reduced
// once.
//
// The *global index* of an element is its place in the concatenation of all units in order, without padding. Initial
// values, exchanges, digests and checkpoints are defined on it, so none of them depends on the layout.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

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
  int unit = 0;  // index into ModelPlan::units
  // False where the gradients follow without the parameters' values, as an embedding's do: the unit is then not
  // gathered again for this stage's backward.
  bool backward_reads_parameters = true;
};

struct ModelPlan {
  std::vector<UnitSpec> units;
  std::vector<StageSpec> stages;  // in forward order; the first consumes tokens, the last yields the loss
  std::int64_t numel() const;
  // The global index of unit u's first element.
  std::int64_t global_offset(int unit) const;
  // Throws UsageError where a unit is empty or unused, a stage names no unit, or a parameter has no elements or a name
  // that another one has. A unit may be used by one stage, or (tied) by the first and the last.
  void validate() const;
};

}  // namespace fedshard::plan
