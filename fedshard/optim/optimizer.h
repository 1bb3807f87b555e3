// Inner optimizers: they update a unit's shard in the arena from its gradient's. AdamW and SGD are elementwise, so a
// shard is as good as the whole; Muon gathers whole matrices (muon.h). Which parameter is updated how is decided
// without torch, in plan/updates.h.
#pragma once
#include <cstdint>
#include <memory>

#include "fedshard/comm/axes.h"
#include "fedshard/plan/updates.h"
#include "fedshard/shard/engine.h"
#include "fedshard/shard/state.h"

namespace fedshard::optim {

struct OptimizerOptions {
  plan::UpdateOptions updates;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  // adamw, and muon for what is not its own
  double momentum = 0;                           // sgd_momentum, muon
  bool nesterov = false;                         // sgd_momentum, muon
  // The moments are on the host and updates are computed there, so that they need no memory of a GPU's: gradients and
  // parameters cross over once a step. An engine on the CPU gains nothing from it.
  bool offload = false;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  // One update of unit u, from the gradients in the engine's arena. Called at most once a step for each unit, in the
  // same order on all ranks of the shard axis, over which it is collective; `step` counts updates from 1. The unit's
  // gradients may have other values afterwards.
  virtual void step(int unit, std::int64_t step, double lr) = 0;
  // As if no step had been made: all moments are zero, and the next step is number 1.
  virtual void reset() = 0;
};

// Updates are computed in fp32; parameters in bf16 are rounded once an update.
//
// AdamW as torch.optim.AdamW (Loshchilov and Hutter, arXiv 1711.05101, decoupled decay scaled by lr), SGD as
// torch.optim.SGD (decay added to the gradient), both by LibTorch's fused kernels, and Muon as torch.optim.Muon. All
// that a step remembers are the registered moments, so an optimizer whose moments are restored goes on as if it had
// never stopped: "exp_avg", and for what AdamW updates "exp_avg_sq"; of sgd_momentum "momentum_buffer".
// `engine`, `axes` and `registry` must outlive the optimizer. Throws what plan::update_rules throws.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, shard::Engine& engine, comm::Axes& axes,
                                          shard::StateRegistry& registry);

}  // namespace fedshard::optim
