// The sharded engine: runs a step's schedule (plan/schedule.h) on one rank.
//
// Every stage has an autograd graph of its own; the activations between stages are detached leaves. So the engine, not
// a hook in some module, decides what is gathered when. It knows no optimizer: `step u` calls back.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "fedshard/comm/axes.h"
#include "fedshard/nn/unit_module.h"
#include "fedshard/plan/reductions.h"
#include "fedshard/plan/schedule.h"
#include "fedshard/shard/arena.h"
#include "fedshard/shard/state.h"
#include "fedshard/shard/unit.h"

namespace fedshard::shard {

// What happens to a step whose loss or gradient norm is not finite, on all ranks of the group alike.
enum class NonFinite {
  stop,  // RunError
  skip,  // no unit is stepped
};

struct EngineOptions {
  UnitDtypes dtypes;
  plan::ScheduleOptions schedule;
  double max_norm = 0;  // gradients are scaled down to this norm; 0: never, as schedule.fused_backward wants it
  NonFinite nonfinite = NonFinite::stop;  // schedule.fused_backward can only stop, when the harm is done
  at::Device device = at::kCPU;           // of parameters, gradients and whatever is gathered
};

// Over one group: all its ranks, all the step's micro-steps. With sum_over_groups the norm is that of all groups'
// gradient, and a step is skipped by all of them or none; loss and tokens stay the group's.
struct StepResult {
  double loss = 0;       // mean over `tokens`
  double tokens = 0;     // unmasked positions
  double grad_norm = 0;  // of the mean gradient, before clipping; each element counted once
  bool skipped = false;  // by NonFinite::skip: loss or norm is not finite, and nothing has changed
};

// Sum of the losses of `tokens` positions, of this rank alone.
struct LossSum {
  double loss = 0;
  double tokens = 0;
};

// What a group's step, or all groups' together, adds up to.
struct StepSums {
  double loss = 0;     // over unmasked positions
  double tokens = 0;   // unmasked positions
  double squares = 0;  // of the elements of the gradient's sum, each counted once
};

// What changes a step's gradient before its norm is taken and it is clipped. At most one of the two may be there.
struct GradientHooks {
  // Turns the sum over this group, of which `sums` is this rank's shard, into that over all groups, and returns what it
  // adds up to there, given what it does in this group (without squares). Called once a step on every rank, when the
  // step's last reduction is over. The gradients are sums over micro-steps and ranks, of the loss times a factor that
  // depends on a micro-batch's shape alone, which must be the same in all groups. If elements of `sums` and the result
  // have the same bits in all groups, so do norm and clipped mean, and groups that began alike stay alike. Not with
  // fused_backward, which never has all sums at once.
  std::function<StepSums(const Arena& sums, const StepSums& of_group)> sum_over_groups = nullptr;
  // Adds to the gradient of unit u in gradients(), which is the mean over the group's tokens and not clipped yet; once
  // a step for each unit that trains. What it adds is part of the norm. With fused_backward, right before u is stepped.
  std::function<void(int unit)> add_to_mean = nullptr;
};

// Called after each operation with the seconds (of a steady clock) at which the engine began and ended with it.
using OpObserver = std::function<void(const plan::Op&, double begin, double end)>;

class Engine {
 public:
  // Writes elements [range.begin, range.end) of a unit as fp32.
  using Filler = std::function<void(int unit, topology::Range range, std::span<float> out)>;

  // `model` and `axes` must outlive the engine. Registers parameters and gradients.
  Engine(const nn::Model& model, int shards, int shard, comm::Axes& axes, EngineOptions options,
         StateRegistry& registry);
  ~Engine();

  // Sets this rank's shard of the parameters, rounded to their dtype.
  void fill(const Filler& filler);

  // One step on this rank's micro-batches, one for each micro-step, all of `positions` tokens, on device(). When all
  // gradients are means over the group's tokens, and clipped, calls step_unit(u) for each unit that trains; it may
  // change the parameters' slice of that unit. With fused_backward it is called when u's own gradient is such a mean,
  // and the gradient is gone after it. `hooks` come before clipping; without any, nothing is computed otherwise.
  StepResult step(std::span<const nn::MicroBatch> batches, const std::function<void(int unit)>& step_unit,
                  const GradientHooks& hooks = {});

  // A forward pass without gradients, with `parameters` in place of the engine's own. Collective over the shard axis.
  LossSum evaluate(const nn::MicroBatch& batch, const Arena& parameters);

  const plan::ModelPlan& plan() const { return model_.plan; }
  const ArenaMap& map() const { return map_; }  // of the parameters
  const Arena& parameters() const { return parameters_; }
  const Arena& gradients() const { return gradients_; }
  at::Device device() const { return options_.device; }
  // The most that gathered units and gradients under way have taken at once; plan::predict_memory knows it beforehand.
  std::int64_t peak_buffer_bytes() const { return pool_.peak_bytes(); }
  void observe(OpObserver observer) { observer_ = std::move(observer); }

 private:
  struct Pass;  // what one step or evaluation has in hand

  void run(const plan::Op& op, Pass& pass);
  void forward(const plan::Op& op, Pass& pass);
  void backward(const plan::Op& op, Pass& pass);
  void step_unit(int unit, Pass& pass);
  at::Tensor compute(int stage, const at::Tensor& input, const nn::MicroBatch& batch, bool keep_graph);
  void prepare_gradients(int stage);
  void finish_oldest_reduction();
  double square_norm(const at::Tensor& gradients) const;
  StepResult finish_gradients(const Pass& pass);
  void finish_gradient_of(int unit, Pass& pass);
  StepSums sum_over_group(const LossSum& mine, double squares) const;
  StepResult judge(const StepSums& of_group, const StepSums& all, double norm) const;

  const nn::Model& model_;
  comm::Axes& axes_;
  EngineOptions options_;
  int first_trained_;  // stage
  ArenaMap map_, gradient_map_;
  Arena parameters_, gradients_;
  BufferPool pool_;
  std::vector<std::unique_ptr<ShardedUnit>> units_;
  std::vector<std::vector<at::Tensor>> stage_parameters_;
  plan::Schedule step_schedule_, evaluation_schedule_;
  plan::ReductionQueue reductions_;
  OpObserver observer_;
};

}  // namespace fedshard::shard
