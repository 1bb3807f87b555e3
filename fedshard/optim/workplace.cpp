#include "fedshard/optim/workplace.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace fedshard::optim {

Workplace::Workplace(shard::Engine& engine, bool offload)
    : engine_(engine), device_(offload ? at::Device(at::kCPU) : engine.device()) {
  std::int64_t largest = 0;
  for (int u = 0; u < engine.map().units(); ++u) {
    if (!engine.plan().units[u].frozen) largest = std::max(largest, engine.map().range(u).size());
  }
  // Pinned host memory is what a GPU reads and writes without a copy of the driver's between.
  const bool pinned = offload && engine.device().is_cuda();
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device_).pinned_memory(pinned);
  if (offload || engine.parameters().dtype() != at::kFloat) parameters_ = at::empty({largest}, options);
  if (offload) gradients_ = at::empty({largest}, options);
}

at::Tensor Workplace::parameters(int unit, topology::Range range) const {
  if (!stages_parameters()) return engine_.parameters().slice(unit, range);
  return parameters_.narrow(0, range.begin - engine_.map().range(unit).begin, range.size());
}

at::Tensor Workplace::gradients(int unit, topology::Range range) const {
  if (!stages_gradients()) return engine_.gradients().slice(unit, range);
  return gradients_.narrow(0, range.begin - engine_.map().range(unit).begin, range.size());
}

void Workplace::begin(int unit) {
  const topology::Range held = engine_.map().range(unit);
  if (stages_parameters()) parameters(unit, held).copy_(engine_.parameters().real(unit));
  if (stages_gradients()) gradients(unit, held).copy_(engine_.gradients().real(unit));
}

void Workplace::end(int unit) {
  if (stages_parameters()) engine_.parameters().real(unit).copy_(parameters(unit, engine_.map().range(unit)));
}

}  // namespace fedshard::optim
