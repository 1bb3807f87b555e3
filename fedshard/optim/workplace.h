// Where a unit's shard is updated: fp32 parameters and gradients on the device of the moments.
//
// Mostly these are the arenas' own slices. Where the arenas are not such (bf16 masters, or moments that are offloaded
// to the host), a unit is brought to a buffer before its update and its parameters are brought back after it, rounded
// once. The buffers are shared by all units, which are updated one after another.
#pragma once
#include <ATen/core/Tensor.h>

#include "fedshard/shard/engine.h"
#include "fedshard/topology/ranges.h"

namespace fedshard::optim {

class Workplace {
 public:
  // On the engine's device, or offloaded to the host. `engine` must outlive it.
  Workplace(shard::Engine& engine, bool offload);
  at::Device device() const { return device_; }

  // Elements [range.begin, range.end) of the unit, within this rank's shard, in fp32 on device(): views that stay, and
  // mean this unit between begin() and end() of it.
  at::Tensor parameters(int unit, topology::Range range) const;
  at::Tensor gradients(int unit, topology::Range range) const;

  void begin(int unit);
  // The parameters are the arena's when this returns.
  void end(int unit);

 private:
  bool stages_parameters() const { return parameters_.defined(); }
  bool stages_gradients() const { return gradients_.defined(); }

  shard::Engine& engine_;
  at::Device device_;
  at::Tensor parameters_, gradients_;  // [elements of the largest shard], undefined where the arenas serve
};

}  // namespace fedshard::optim
