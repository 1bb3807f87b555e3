#include "fedshard/shard/engine.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "fedshard/base/clock.h"
#include "fedshard/base/error.h"

namespace fedshard::shard {

struct Engine::Pass {
  std::span<const nn::MicroBatch> batches;
  const std::function<void(int)>* step_unit = nullptr;
  const GradientHooks* hooks = nullptr;
  const Arena* parameters = nullptr;
  bool trains = false;
  double scale = 1;                         // of the loss before backward: keeps gradients near their final size
  std::vector<at::Tensor> inputs, outputs;  // of each stage, while its backward is to come
  at::Tensor output_gradient;               // of the stage whose backward is next
  LossSum sum;
  double mean = 0;                   // with fused_backward: the factor that makes a sum's gradient the mean's
  double squares = 0;                // with fused_backward: of the gradients so far
  std::optional<StepResult> result;  // once the gradients are complete
};

namespace {

double unmasked(const nn::MicroBatch& batch) { return batch.labels.ge(0).sum().item<double>(); }

// Backward used the loss times `scale`; times this, its gradient becomes that of the mean over all tokens.
double mean_factor(double scale, double tokens) { return tokens > 0 ? 1.0 / (scale * tokens) : 0.0; }

std::vector<at::Tensor> parameters_of(const plan::StageSpec& stage, const plan::ModelPlan& plan,
                                      const std::vector<std::unique_ptr<ShardedUnit>>& units) {
  std::vector<at::Tensor> parameters;
  for (const int u : stage.units) {
    const std::span<const at::Tensor> part = units[u]->parameters();
    const std::vector<int>& places = plan.units[u].places;
    if (places.empty()) parameters.insert(parameters.end(), part.begin(), part.end());
    for (std::size_t p = 0; p < places.size(); ++p) {
      parameters.resize(std::max(parameters.size(), static_cast<std::size_t>(places[p]) + 1));
      parameters[places[p]] = part[p];
    }
  }
  return parameters;
}

}  // namespace

Engine::Engine(const nn::Model& model, int shards, int shard, comm::Axes& axes, EngineOptions options,
               StateRegistry& registry)
    : model_(model),
      axes_(axes),
      options_(options),
      first_trained_((model.plan.validate(), model.plan.first_trained_stage())),  // whose faults come first
      map_(model.plan, shards, shard, ArenaRoom::every_unit, options.device),
      gradient_map_(model.plan, shards, shard,
                    options.schedule.fused_backward ? ArenaRoom::one_trained_unit : ArenaRoom::trained_units,
                    options.device),
      parameters_(map_, options.dtypes.master),
      gradients_(gradient_map_),
      step_schedule_(plan::step_schedule(model.plan, options.schedule)),
      evaluation_schedule_(plan::evaluation_schedule(model.plan, options.schedule.prefetch)),
      reductions_(model.plan, options.schedule.reduce_each_micro_step) {
  base::require(model.stages.size() == model.plan.stages.size(), "{} stage functions for {} stages",
                model.stages.size(), model.plan.stages.size());
  base::require(!options.schedule.fused_backward || (options.max_norm == 0 && options.nonfinite == NonFinite::stop),
                "fused_backward knows the whole gradient's norm only when every unit has stepped");
  for (int u = 0; u < map_.units(); ++u) {
    units_.push_back(std::make_unique<ShardedUnit>(model.plan.units[u], u, map_, options.dtypes, axes, pool_));
  }
  for (const plan::StageSpec& stage : model.plan.stages) {
    stage_parameters_.push_back(parameters_of(stage, model.plan, units_));
  }
  registry.add("parameters", Role::parameters, Scope::shared, parameters_);
  registry.add("gradients", Role::gradients, Scope::group, gradients_);
}

Engine::~Engine() = default;

void Engine::fill(const Filler& filler) {
  for (int u = 0; u < map_.units(); ++u) {
    const at::Tensor values = parameters_.real(u);
    const at::Tensor on_host = values.to(at::kCPU, at::kFloat);  // the same tensor where it is such a one
    filler(u, map_.range(u), {on_host.mutable_data_ptr<float>(), static_cast<std::size_t>(on_host.numel())});
    values.copy_(on_host);
  }
}

StepResult Engine::step(std::span<const nn::MicroBatch> batches, const std::function<void(int unit)>& step_unit,
                        const GradientHooks& hooks) {
  base::require(static_cast<int>(batches.size()) == options_.schedule.micro_steps,
                "{} micro-batches for {} micro-steps", batches.size(), options_.schedule.micro_steps);
  base::require(!hooks.sum_over_groups || !(hooks.add_to_mean || options_.schedule.fused_backward),
                "a sum over groups goes neither with what is added to a group's mean nor with fused_backward");
  Pass pass;
  pass.batches = batches;
  pass.step_unit = &step_unit;
  pass.hooks = &hooks;
  pass.parameters = &parameters_;
  pass.trains = true;
  // The same on every rank, since all micro-batches have one shape; the exact mean is taken when all tokens are known.
  pass.scale = 1.0 / static_cast<double>(batches[0].tokens.numel());
  if (options_.schedule.fused_backward) {
    std::array<double, 1> tokens{unmasked(batches[0])};
    axes_.group->sum(tokens);
    pass.mean = mean_factor(pass.scale, tokens[0]);
  }
  for (const plan::Op& op : step_schedule_) run(op, pass);
  if (!options_.schedule.fused_backward) return *pass.result;
  const StepSums sums = sum_over_group(pass.sum, pass.squares);
  return judge(sums, sums, std::sqrt(sums.squares));
}

LossSum Engine::evaluate(const nn::MicroBatch& batch, const Arena& parameters) {
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
    case plan::OpKind::recompute:
      pass.outputs[op.stage] = compute(op.stage, pass.inputs[op.stage], pass.batches[op.micro_step], true);
      break;
    case plan::OpKind::backward:
      backward(op, pass);
      break;
    case plan::OpKind::reduce:
      units_[op.unit]->reduce();
      reductions_.begin(op);
      break;
    case plan::OpKind::step:
      step_unit(op.unit, pass);
      break;
    case plan::OpKind::exchange:
    case plan::OpKind::apply:
      base::require(false, "the engine runs steps; rounds are the federation's");
  }
  if (observer_) observer_(op, begin, clock.now());
}

at::Tensor Engine::compute(int stage, const at::Tensor& input, const nn::MicroBatch& batch, bool keep_graph) {
  for (const int unit : model_.plan.stages[stage].units) units_[unit]->gathered();
  const c10::AutoGradMode mode(keep_graph);
  return model_.stages[stage](stage_parameters_[stage], input, batch);
}

void Engine::forward(const plan::Op& op, Pass& pass) {
  const int stages = static_cast<int>(model_.stages.size()), stage = op.stage;
  const nn::MicroBatch& batch = pass.batches[op.micro_step];
  const auto keeps_graph = [&](int s) { return pass.trains && plan::keeps_graph(model_.plan, options_.schedule, s); };
  at::Tensor input;
  if (stage == 0) {
    pass.inputs.assign(stages, {});
    pass.outputs.assign(stages, {});
  } else {
    input = pass.outputs[stage - 1].detach().set_requires_grad(pass.trains && stage > first_trained_);
    if (!keeps_graph(stage - 1)) pass.outputs[stage - 1].reset();
  }
  const at::Tensor output = compute(stage, input, batch, keeps_graph(stage));
  if (pass.trains && stage >= first_trained_) pass.inputs[stage] = input;
  pass.outputs[stage] = output;
  if (stage + 1 < stages) return;
  base::require(output.dim() == 0 && output.scalar_type() == at::kFloat, "stage '{}' must return the loss as one fp32",
                model_.plan.stages[stage].name);
  pass.sum.loss += output.item<double>();
  pass.sum.tokens += unmasked(batch);
  pass.output_gradient = at::full({}, pass.scale, output.options());
}

void Engine::backward(const plan::Op& op, Pass& pass) {
  const plan::StageSpec& stage = model_.plan.stages[op.stage];
  prepare_gradients(op.stage);
  // Autograd reads the parameters through views it saved, so nothing but this wait tells it that they are there.
  for (const int unit : stage.units) {
    if (stage.backward_reads_parameters) units_[unit]->gathered();
  }
  at::Tensor& output = pass.outputs[op.stage];
  // The first stage may share a unit with the last of which it uses the frozen part alone: it then adds nothing.
  const bool adds_nothing = op.stage == 0 && stage.units.size() > 1 && !output.requires_grad();
  // A graph without parameters or inputs that need gradients has no backward; a unit of constants would be one.
  base::require(output.requires_grad() || adds_nothing, "the output of stage '{}' depends on none of its parameters",
                stage.name);
  if (!adds_nothing) torch::autograd::backward({output}, {pass.output_gradient});
  at::Tensor& input = pass.inputs[op.stage];
  pass.output_gradient = input.defined() ? input.grad() : at::Tensor();
  base::require(op.stage == first_trained_ || pass.output_gradient.defined(),
                "stage '{}' passes no gradient to its input", stage.name);
  output.reset();
  input.reset();
}

void Engine::prepare_gradients(int stage) {
  for (const int u : model_.plan.stages[stage].units) {
    ShardedUnit& unit = *units_[u];
    if (!unit.trains()) continue;
    while (reductions_.must_finish_before(u, unit.has_gradients())) {
      base::require(!options_.schedule.fused_backward, "unit {} was to step before another one's backward", u);
      finish_oldest_reduction();
    }
    unit.prepare_gradients();
  }
}

void Engine::finish_oldest_reduction() {
  const plan::Reduction oldest = reductions_.take_oldest();
  units_[oldest.unit]->finish_reduce(gradients_, oldest.add);
}

void Engine::step_unit(int unit, Pass& pass) {
  if (options_.schedule.fused_backward) {
    finish_gradient_of(unit, pass);
  } else if (!pass.result) {
    pass.result = finish_gradients(pass);
  }
  if (!pass.result || !pass.result->skipped) (*pass.step_unit)(unit);
}

// Replicas hold the same gradients; the first one speaks for all, so that each element counts once.
double Engine::square_norm(const at::Tensor& gradients) const {
  if (axes_.replica->index() != 0) return 0;
  // In fp64, which torch gets by a copy: of so many elements at a time.
  constexpr std::int64_t kChunk = std::int64_t{1} << 14;
  double squares = 0;
  for (const at::Tensor& chunk : gradients.split(kChunk)) {
    const double norm = at::linalg_vector_norm(chunk, 2, std::nullopt, false, at::kDouble).item<double>();
    squares += norm * norm;
  }
  return squares;
}

StepResult Engine::finish_gradients(const Pass& pass) {
  while (!reductions_.empty()) finish_oldest_reduction();
  const c10::NoGradGuard no_grad;
  const at::Tensor& gradients = gradients_.flat();
  const auto& [sum_over_groups, add_to_mean] = *pass.hooks;
  const bool norm_comes_later = sum_over_groups || add_to_mean;
  const StepSums of_group = sum_over_group(pass.sum, norm_comes_later ? 0 : square_norm(gradients));
  StepSums all = sum_over_groups ? sum_over_groups(gradients_, of_group) : of_group;
  double mean = mean_factor(pass.scale, all.tokens);
  if (add_to_mean) {
    gradients.mul_(std::exchange(mean, 1.0));
    for (int u = 0; u < map_.units(); ++u) {
      if (units_[u]->trains()) add_to_mean(u);
    }
    all = sum_over_group(pass.sum, square_norm(gradients));
  }
  const StepResult result = judge(of_group, all, std::sqrt(all.squares) * mean);
  if (result.skipped) return result;
  // The same rule as torch.nn.utils.clip_grad_norm_.
  const double clip = options_.max_norm > 0 ? std::min(1.0, options_.max_norm / (result.grad_norm + 1e-6)) : 1.0;
  const double factor = mean * clip;
  if (factor != 1.0) gradients.mul_(factor);
  return result;
}

// Of fused_backward. Units' gradients share one place: the one before has been used.
void Engine::finish_gradient_of(int unit, Pass& pass) {
  while (reductions_.is_reducing(unit)) finish_oldest_reduction();
  const c10::NoGradGuard no_grad;
  const at::Tensor gradient = gradients_.unit(unit).mul_(pass.mean);
  if (pass.hooks->add_to_mean) pass.hooks->add_to_mean(unit);
  pass.squares += square_norm(gradient);
}

// `squares`: of this rank's gradients.
StepSums Engine::sum_over_group(const LossSum& mine, double squares) const {
  std::array<double, 3> sums{mine.loss, mine.tokens, squares};
  axes_.group->sum(sums);
  return {sums[0], sums[1], sums[2]};
}

// all: what decides whether the step counts; the group's own, or all groups'. norm: of the mean gradient.
StepResult Engine::judge(const StepSums& of_group, const StepSums& all, double norm) const {
  const auto mean_loss = [](const StepSums& sums) { return sums.tokens > 0 ? sums.loss / sums.tokens : 0.0; };
  StepResult result{mean_loss(of_group), of_group.tokens, norm};
  const double loss = mean_loss(all);
  if (std::isfinite(loss) && std::isfinite(norm)) return result;
  if (options_.nonfinite == NonFinite::skip) {
    result.skipped = true;
    return result;
  }
  base::fail<base::RunError>(
      "rank {}: the {} of the step is not finite (loss {}, gradient norm {}); lower the learning "
      "rate, warm up longer, compute in fp32, or set training.nonfinite = \"skip\"",
      axes_.group->members().rank(), std::isfinite(loss) ? "gradient norm" : "loss", loss, std::abs(norm));
}

}  // namespace fedshard::shard
