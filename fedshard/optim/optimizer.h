// Inner optimizers: they update a unit's shard in the arena from its gradient's. Elementwise, so a shard is as good as
// the whole. Weight decay acts on matrices only, not on norms and other vectors (the usual practice for Llama).
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "fedshard/shard/engine.h"
#include "fedshard/shard/state.h"

namespace fedshard::optim {

struct OptimizerOptions {
  enum class Name { adamw, sgd };
  Name name = Name::adamw;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  // adamw
  double momentum = 0;                           // sgd
  double weight_decay = 0.1;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // One update of unit u. Called once a step for each unit; `step` counts updates from 1.
  virtual void step(int unit, std::int64_t step, double lr) = 0;
};

// AdamW as torch.optim.AdamW (Loshchilov and Hutter, arXiv 1711.05101, decoupled decay scaled by lr) or SGD as
// torch.optim.SGD (decay added to the gradient), by LibTorch's fused kernels. Moments are fp32 arenas, registered.
// `engine` and `registry` must outlive the optimizer.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, shard::Engine& engine,
                                          shard::StateRegistry& registry);

}  // namespace fedshard::optim
