// What the outer optimizer keeps from round to round: the anchor (the parameters at the end of the last round) and its
// moments, of this rank's slice of the model alone. So the ranks and replicas of a group share the work and the memory
// (but with the scheme naive, where the slice is the whole shard).
//
// It is the host's, as the exchange is. Plain fedavg keeps nothing.
#pragma once
#include <ATen/core/Tensor.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fedshard/federation/outer.h"
#include "fedshard/shard/arena.h"
#include "fedshard/shard/state.h"

namespace fedshard::federation {

// This rank's part of sums over a group's model.
struct ChangeSums {
  double square = std::numeric_limits<double>::quiet_NaN();       // of the group's change since the anchor
  double with_mean = std::numeric_limits<double>::quiet_NaN();    // its product with the groups' mean change
  double mean_square = std::numeric_limits<double>::quiet_NaN();  // of that
};

class OuterState {
 public:
  // slice: where the elements of this rank's slice lie, packed, on the CPU. Registers "anchor", where the options need
  // one or changes from it are asked for, and the moments ("outer_0", "outer_1") that the options need, with `suffix`
  // behind their names. `registry` must outlive it. Throws what plan::check_options throws.
  OuterState(const OuterOptions& options, bool asked_for_changes, shard::ArenaMap slice, shard::StateRegistry& registry,
             const std::string& suffix = "");

  bool keeps_anchor() const { return anchor_ != nullptr; }

  // Makes these the anchor. parameters: the packed slice, of any dtype, on the CPU.
  void set_anchor(const at::Tensor& parameters);

  // Squared norm of (anchor - values), a packed slice; over a group's ranks these add up to the whole model's. Not
  // finite where an element of `values` is not.
  double square_distance(const at::Tensor& values) const;

  // Of a group's parameters and the groups' mean of them, packed slices of one dtype.
  ChangeSums change_sums(const at::Tensor& parameters, const at::Tensor& mean) const;

  // anchor - parameters, and back: the parameters that a change leads to. A change of zero leads to the anchor, to the
  // bit. All are packed slices, in fp32.
  at::Tensor change_of(const at::Tensor& parameters) const;
  at::Tensor changed_by(const at::Tensor& change) const;

  // The outer step from the groups' mean (a packed slice). `norm`: of the whole model's pseudo-gradient, the same on
  // all ranks of the world; read where the options clip. next_parameters: where it leads from the anchor, which must be
  // kept, rounded to the dtype of `parameters` (a packed slice); the state stays as it is. commit, with the same
  // arguments and that dtype: the state takes the step, and its anchor is these parameters.
  void next_parameters(const at::Tensor& mean, double norm, const at::Tensor& parameters) const;
  void commit(const at::Tensor& mean, double norm, at::ScalarType dtype);

 private:
  at::Tensor step(const at::Tensor& mean, double factor, topology::Range chunk, bool keep) const;

  OuterOptions options_;
  shard::ArenaMap slice_;
  std::unique_ptr<shard::Arena> anchor_;
  std::vector<std::unique_ptr<shard::Arena>> moments_;
  bool has_anchor_ = false;
};

}  // namespace fedshard::federation
