#include "fedshard/shard/engine.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "fedshard/base/clock.h"
#include "fedshard/base/error.h"

namespace fedshard::shard {

struct Engine::Pass {
  std::span<const nn::MicroBatch> batches;
  const std::function<void(int)>* step_unit = nullptr;
  const Arena* parameters = nullptr;
  bool trains = false;
  double scale = 1;                         // of the loss before backward: keeps gradients near their final size
  std::vector<at::Tensor> inputs, outputs;  // of each stage, while its backward is to come
  at::Tensor output_gradient;               // of the stage whose backward is next
  LossSum sum;
  std::optional<StepResult> result;  // once the gradients are complete
};

namespace {

double unmasked(const nn::MicroBatch& batch) { return batch.labels.ge(0).sum().item<double>(); }

}  // namespace

Engine::Engine(const nn::Model& model, int shards, int shard, comm::Axes& axes, EngineOptions options,
               StateRegistry& registry)
    : model_(model),
      axes_(axes),
      options_(options),
      map_(model.plan, shards, shard),
      parameters_(map_),
      gradients_(map_),
      step_schedule_(plan::step_schedule(model.plan, options.schedule)),
      evaluation_schedule_(plan::evaluation_schedule(model.plan, options.schedule.prefetch)) {
  model.plan.validate();
  base::require(model.stages.size() == model.plan.stages.size(), "{} stage functions for {} stages",
                model.stages.size(), model.plan.stages.size());
  for (int u = 0; u < map_.units(); ++u) {
    units_.push_back(std::make_unique<ShardedUnit>(model.plan.units[u], u, map_, options.dtypes, axes, pool_));
  }
  registry.add("parameters", Role::parameters, Scope::shared, parameters_);
  registry.add("gradients", Role::gradients, Scope::group, gradients_);
}

Engine::~Engine() = default;

void Engine::fill(const Filler& filler) {
  for (int u = 0; u < map_.units(); ++u) {
    const at::Tensor values = parameters_.real(u);
    filler(u, map_.range(u), {values.mutable_data_ptr<float>(), static_cast<std::size_t>(values.numel())});
  }
}

StepResult Engine::step(std::span<const nn::MicroBatch> batches, const std::function<void(int)>& step_unit) {
  base::require(static_cast<int>(batches.size()) == options_.schedule.micro_steps,
                "{} micro-batches for {} micro-steps", batches.size(), options_.schedule.micro_steps);
  Pass pass;
  pass.batches = batches;
  pass.step_unit = &step_unit;
  pass.parameters = &parameters_;
  pass.trains = true;
  // The same on every rank, since all micro-batches have one shape; the exact mean is taken when all tokens are known.
  pass.scale = 1.0 / static_cast<double>(batches[0].tokens.numel());
  for (const plan::Op& op : step_schedule_) run(op, pass);
  return *pass.result;
}

LossSum Engine::evaluate(const nn::MicroBatch& batch, const Arena& parameters) {
  const c10::NoGradGuard no_grad;
  Pass pass;
  pass.batches = {&batch, 1};
  pass.parameters = &parameters;
  for (const plan::Op& op : evaluation_schedule_) run(op, pass);
  return pass.sum;
}

void Engine::run(const plan::Op& op, Pass& pass) {
  static const base::SteadyClock clock;
  const double begin = observer_ ? clock.now() : 0;
  switch (op.kind) {
    case plan::OpKind::gather:
      units_[op.unit]->gather(*pass.parameters);
      break;
    case plan::OpKind::release:
      units_[op.unit]->release();
      break;
    case plan::OpKind::forward:
      forward(op, pass);
      break;
    case plan::OpKind::backward:
      backward(op, pass);
      break;
    case plan::OpKind::reduce:
      units_[op.unit]->reduce();
      reductions_.begin(op);
      break;
    case plan::OpKind::step:
      if (!pass.result) pass.result = finish_gradients(pass);
      (*pass.step_unit)(op.unit);
      break;
    case plan::OpKind::exchange:
    case plan::OpKind::apply:
      base::require(false, "the engine runs steps; rounds are the federation's");
  }
  if (observer_) observer_(op, begin, clock.now());
}

void Engine::forward(const plan::Op& op, Pass& pass) {
  const int stages = static_cast<int>(model_.stages.size());
  const nn::MicroBatch& batch = pass.batches[op.micro_step];
  if (op.stage == 0) {
    pass.inputs.assign(stages, {});
    pass.outputs.assign(stages, {});
  } else {
    at::Tensor& before = pass.outputs[op.stage - 1];
    pass.inputs[op.stage] = pass.trains ? before.detach().set_requires_grad(true) : std::move(before);
  }
  const at::Tensor output = model_.stages[op.stage](units_[op.unit]->gathered(), pass.inputs[op.stage], batch);
  if (!pass.trains) pass.inputs[op.stage].reset();
  pass.outputs[op.stage] = output;
  if (op.stage + 1 < stages) return;
  base::require(output.dim() == 0 && output.scalar_type() == at::kFloat, "stage '{}' must return the loss as one fp32",
                model_.plan.stages[op.stage].name);
  pass.sum.loss += output.item<double>();
  pass.sum.tokens += unmasked(batch);
  pass.output_gradient = at::full({}, pass.scale, output.options());
}

void Engine::backward(const plan::Op& op, Pass& pass) {
  ShardedUnit& unit = *units_[op.unit];
  while (reductions_.must_finish_before(op.unit, unit.has_gradients())) finish_oldest_reduction();
  unit.prepare_gradients();
  // Autograd reads the parameters through views it saved, so nothing but this wait tells it that they are there.
  if (model_.plan.stages[op.stage].backward_reads_parameters) unit.gathered();
  at::Tensor& output = pass.outputs[op.stage];
  // A graph without parameters or inputs that need gradients has no backward; a unit of constants would be one.
  base::require(output.requires_grad(), "the output of stage '{}' depends on none of its parameters",
                model_.plan.stages[op.stage].name);
  torch::autograd::backward({output}, {pass.output_gradient});
  at::Tensor& input = pass.inputs[op.stage];
  pass.output_gradient = input.defined() ? input.grad() : at::Tensor();
  base::require(op.stage == 0 || pass.output_gradient.defined(), "stage '{}' passes no gradient to its input",
                model_.plan.stages[op.stage].name);
  output.reset();
  input.reset();
}

void Engine::finish_oldest_reduction() {
  const plan::Reduction oldest = reductions_.take_oldest();
  units_[oldest.unit]->finish_reduce(gradients_, oldest.add);
}

StepResult Engine::finish_gradients(const Pass& pass) {
  while (!reductions_.empty()) finish_oldest_reduction();
  const c10::NoGradGuard no_grad;
  // Replicas hold the same gradients; the first one speaks for all, so that each element counts once.
  double squares = 0;
  if (axes_.replica->index() == 0) {
    const double norm = at::linalg_vector_norm(gradients_.flat(), 2, std::nullopt, false, at::kDouble).item<double>();
    squares = norm * norm;
  }
  std::array<double, 3> totals{pass.sum.loss, pass.sum.tokens, squares};
  axes_.group->sum(totals);
  const auto [loss, tokens, square_sum] = totals;
  // Backward used the loss times pass.scale; the gradient of the mean over all tokens is that times `mean`.
  const double mean = tokens > 0 ? 1.0 / (pass.scale * tokens) : 0.0;
  StepResult result{tokens > 0 ? loss / tokens : 0.0, tokens, std::sqrt(square_sum) * mean};
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) {
    base::fail<base::RunError>(
        "rank {}: the {} of the step is not finite (loss {}, gradient norm {}); lower the learning "
        "rate, warm up longer, or compute in fp32",
        axes_.group->members().rank(), std::isfinite(result.loss) ? "gradient norm" : "loss", result.loss,
        std::abs(result.grad_norm));
  }
  // The same rule as torch.nn.utils.clip_grad_norm_.
  const double clip = options_.max_norm > 0 ? std::min(1.0, options_.max_norm / (result.grad_norm + 1e-6)) : 1.0;
  if (mean * clip != 1.0) gradients_.flat().mul_(mean * clip);
  return result;
}

}  // namespace fedshard::shard
