// One unit on one rank: its shard in the arena, its gathered parameters while they are needed, and its gradients on
// their way to the arena. The verbs are gather, release and reduce.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <vector>

#include "fedshard/comm/axes.h"
#include "fedshard/shard/arena.h"
#include "fedshard/shard/flat_buffer.h"

namespace fedshard::shard {

struct UnitDtypes {
  at::ScalarType compute = at::kFloat;  // of gathered parameters
  at::ScalarType reduce = at::kFloat;   // of gradients while they are summed; the arena adds them up in fp32
  // Of the parameters that are kept and updated. An update is computed in fp32 and rounded once; in bf16, one of less
  // than about 2^-9 of a parameter is lost.
  at::ScalarType master = at::kFloat;
};

class ShardedUnit {
 public:
  // The references must outlive the unit.
  ShardedUnit(const plan::UnitSpec& spec, int index, const ArenaMap& map, UnitDtypes dtypes, comm::Axes& axes,
              BufferPool& pool);
  // Waits for what is under way, whatever its outcome: its buffers go now.
  ~ShardedUnit();

  // The parameters as gathered() returns them, whether or not they are there; those of a frozen unit need no gradients.
  std::span<const at::Tensor> parameters() const { return parameters_; }
  bool trains() const { return gradients_.has_value(); }

  // Begins to gather the unit from `parameters`. Returns before the values are there.
  void gather(const Arena& parameters);
  // Waits for the gather. The unit's parameters as leaves in the compute dtype, in the order of the spec; valid until
  // release().
  std::span<const at::Tensor> gathered();
  void release();

  // The rest is for units that train.
  // Gives the parameters zeroed .grad buffers to accumulate into, if they have none yet.
  void prepare_gradients();
  bool has_gradients() const { return gradients_ && gradients_->present(); }
  // Begins to sum the gradients over the shard axis, then over the replica axis. Nothing may add to them afterwards.
  void reduce();
  // Waits for the sum and puts it into the arena's slice, or adds it there; then frees the gradient buffer.
  void finish_reduce(const Arena& gradients, bool add);

 private:
  int index_;
  const ArenaMap& map_;
  comm::Axes& axes_;
  FlatBuffer flat_;                         // [F * shard_numel] in the compute dtype
  std::optional<FlatBuffer> gradients_;     // [F * shard_numel] in the reduce dtype
  std::vector<at::Tensor> parameters_;      // leaves: views of flat_
  std::vector<at::Tensor> gradient_views_;  // views of gradients_
  comm::WorkPtr gathering_, reducing_;
};

}  // namespace fedshard::shard
