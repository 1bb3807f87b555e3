#include "fedshard/train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "fedshard/base/log.h"
#include "fedshard/config/options.h"
#include "fedshard/eval/perplexity.h"
#include "fedshard/nn/init.h"
#include "fedshard/train/options.h"

namespace fedshard::train {

Trainer::Trainer(const RankContext& context)
    : context_(context),
      at_(context.layout.at(context.rank)),
      started_s_(clock_.now()),
      model_(model_of(context.config, context.inputs.dims)),
      engine_(model_, context.layout.group(at_.group).shards, at_.shard, context.axes,
              engine_options(context.config, context.device), registry_),
      optimizer_(optim::make_optimizer(optimizer_options(context.config), engine_, context.axes, registry_)),
      lr_schedule_(lr_schedule(context.config)),
      rounds_(config::round_options(context.config.federation)),
      uneven_(context.layout.groups() > 1 && !context.config.federation.every.is_even()),
      federation_(context.layout, context.rank, federation_options(context.config), engine_, context.axes,
                  context.coordinator, registry_, {context.round_axes, &context.round_traffic}),
      loader_(context.inputs.train, static_cast<std::uint64_t>(context.config.training.seed),
              dealing_of(context.config, context.layout.world(), context.rank)),
      marks_(static_cast<std::size_t>(rounds_.fragments)) {
  load_weights();
  trace_operations();
}

Trainer::~Trainer() = default;

base::ExitStatus Trainer::run() {
  record_start();
  marked_s_ = clock_.now();
  while (step_ < context_.config.training.steps && !stop_) {
    if (is_synchronous(step_ + 1)) {
      train_step();  // not in turn: it waits for the other groups
    } else {
      in_turn([this] { train_step(); });
    }
    run_rounds();
    if (validation_is_due()) validate();
  }
  if (federation_.is_under_way()) finish_round();
  federation_.settle();
  if (validated_step_ != step_) validate();
  record_traffic();
  record_end();
  return stop_ ? base::ExitStatus::stopped : base::ExitStatus::ok;
}

// One update of this group's model. Within the group: sharded data parallelism. Between groups: nothing, but in the
// warm-up, when one gradient updates the models of all.
void Trainer::train_step() {
  const std::vector<nn::MicroBatch> batches = next_batches();
  const bool together = is_synchronous(step_ + 1);
  const double lr = lr_schedule_.at(step_ + 1);
  const shard::StepResult result = engine_.step(
      batches, [&](int unit) { optimizer_->step(unit, updates_ + 1, lr); },
      together ? federation_.synchronous_step() : federation_.local_step());
  ++step_;
  ++own_steps_;
  count(result);
  context_.coordinator.set_step(step_);
  record_step(result, lr);
  if (context_.layout.groups() == 1 || together) stop_ = time_is_up();
  if (together) mark_round();  // what all have done together leaves no group apart
  if (together && step_ == rounds_.start_step) federation_.end_warm_up();
}

bool Trainer::is_synchronous(std::int64_t step) const {
  return context_.layout.groups() > 1 && step <= rounds_.start_step;
}

// A skipped step has trained on no token, and for the optimizer it has not happened.
void Trainer::count(const shard::StepResult& result) {
  constexpr int kMostSkipped = 100;
  skipped_in_row_ = result.skipped ? skipped_in_row_ + 1 : 0;
  if (skipped_in_row_ == kMostSkipped) {
    base::fail<base::RunError>(
        "rank {}: group {} has skipped {} steps in a row, the last one step {}: its loss or gradient norm is no longer "
        "finite; lower the learning rate, warm up longer, or compute in fp32",
        context_.rank, at_.group, kMostSkipped, step_);
  }
  if (result.skipped) {
    ++skipped_;
    base::log_error("step {} is skipped: loss {}, gradient norm {}", step_, result.loss, result.grad_norm);
    return;
  }
  ++updates_;
  tokens_ += static_cast<std::int64_t>(result.tokens);
}

// Every K steps all groups' models become one: their weighted mean, or where the outer optimizer goes from there. What
// is begun here may be finished some steps later, and fragments of the model may take turns. Groups that make unlike
// numbers of steps meet when each has done its part of the round.
void Trainer::run_rounds() {
  if (context_.layout.groups() == 1) return;
  if (!uneven_) {
    for (const plan::Op& op : plan::round_operations(rounds_, step_)) {
      op.kind == plan::OpKind::exchange ? begin_round(op.fragment) : finish_round();
    }
  } else if (round_is_over()) {
    if (context_.turns != nullptr) context_.turns->meet(at_.group);
    begin_round(0);
    finish_round();
  }
}

bool Trainer::round_is_over() {
  const plan::Pace& pace = context_.config.federation.every;
  const Mark& last = marks_.front();
  if (step_ == last.step) return false;  // in the warm-up
  if (step_ == context_.config.training.steps) return true;
  bool over =
      plan::round_is_over(pace, at_.group, {step_ - last.step, tokens_ - last.tokens, clock_.now() - marked_s_});
  if (pace.by != plan::Pace::By::seconds) return over;
  // By this rank's clock, and others go differently: when one rank's time is up, the group's is.
  const std::vector<double> mine{over || past_time_limit() ? 1.0 : 0.0};
  for (const auto& theirs : context_.axes.group->collect(mine)) over = over || theirs[0] > 0;
  return over;
}

void Trainer::mark_round() {
  std::fill(marks_.begin(), marks_.end(), Mark{step_, tokens_});
  marked_s_ = clock_.now();
}

void Trainer::begin_round(int fragment) {
  Mark& last = marks_[static_cast<std::size_t>(fragment)];
  federation_.begin_round({.round = ++round_,
                           .step = step_,
                           .steps = step_ - last.step,
                           .tokens = tokens_ - last.tokens,
                           .updates = updates_,
                           .wants_stop = past_time_limit(),
                           .fragment = fragment,
                           .traffic = rounds_.delay > 0 ? context_.traffic.read() : comm::Traffic{}});
  last = {step_, tokens_};
}

void Trainer::finish_round() {
  const federation::RoundOutcome outcome = federation_.finish_round();
  stop_ = outcome.stop;
  if (uneven_) {
    step_ += *std::max_element(outcome.steps.begin(), outcome.steps.end()) -
             outcome.steps[static_cast<std::size_t>(at_.group)];
    context_.coordinator.set_step(step_);
    mark_round();
  }
  const config::InnerState inner_state = context_.config.federation.inner_state;
  // Moments of a group that was not sound would lead it astray again.
  const bool left_out = std::count(outcome.left_out.begin(), outcome.left_out.end(), at_.group) > 0;
  if (inner_state == config::InnerState::average) {
    updates_ = outcome.updates;
  } else if (left_out || inner_state == config::InnerState::reset) {
    optimizer_->reset();
    updates_ = 0;
  }
}

bool Trainer::validation_is_due() const {
  const std::int64_t interval = context_.config.validation.interval;
  // Uneven rounds may step over a multiple.
  return interval > 0 && groups_are_in_step() &&
         step_ / interval > std::max<std::int64_t>(validated_step_, 0) / interval;
}

// Perplexity of the groups' mean, whatever the moment; training goes on as if it had not happened.
void Trainer::validate() {
  validated_step_ = step_;
  if (!context_.inputs.eval) return;
  const double begin = clock_.now();
  const config::Config& config = context_.config;
  const eval::EvalOptions options{config.training.local_batch_size, config.validation.steps,
                                  context_.inputs.document_end};
  const auto evaluate = [&](const shard::Arena& parameters) {
    shard::LossSum mine;
    in_turn([&] {
      mine =
          eval::evaluate(engine_, parameters, *context_.inputs.eval, context_.layout.world(), context_.rank, options);
    });
    return eval::sum_over_world(context_.axes, mine);
  };
  const auto oldest =
      std::min_element(marks_.begin(), marks_.end(), [](const Mark& a, const Mark& b) { return a.tokens < b.tokens; });
  const eval::EvalResult result = context_.layout.groups() > 1
                                      ? evaluate(federation_.mean_parameters(tokens_ - oldest->tokens))
                                      : evaluate(engine_.parameters());
  const double spent = clock_.now() - begin;
  marked_s_ += spent;
  validation_s_ += spent;
  last_record_s_ += spent;
  if (context_.rank != 0) return;
  metrics::EvalRecord record;
  record.step = step_;
  record.loss = result.loss;
  record.perplexity = result.perplexity();
  record.tokens = result.tokens;
  send(record);
}

bool Trainer::past_time_limit() const {
  const double limit = context_.config.training.time_limit_s;
  return limit > 0 && clock_.now() - started_s_ >= limit;
}

// Clocks differ between ranks, so those that step together decide together: when one rank's time is up, all stop.
bool Trainer::time_is_up() {
  if (context_.config.training.time_limit_s <= 0) return false;
  std::vector<double> votes{past_time_limit() ? 1.0 : 0.0};
  comm::sum_over_world(context_.axes, votes);
  return votes[0] > 0;
}

void Trainer::load_weights() {
  const auto& weights = context_.inputs.weights;
  const auto seed = static_cast<std::uint64_t>(context_.config.training.seed);
  engine_.fill([&](int unit, topology::Range range, std::span<float> out) {
    if (weights) {
      weights->read_slice(unit, range.begin, range.end, out);
    } else {
      nn::initialize_slice(model_.plan, seed, unit, range.begin, range.end, out);
    }
  });
  federation_.set_anchor();
}

std::vector<nn::MicroBatch> Trainer::next_batches() {
  const config::TrainingConfig& training = context_.config.training;
  const std::int64_t steps = training.gradient_accumulation_steps, length = training.seq_len;
  const at::Tensor ids = at::empty({steps, training.local_batch_size, length + 1}, at::kInt);
  loader_.next({ids.mutable_data_ptr<std::int32_t>(), static_cast<std::size_t>(ids.numel())});
  std::vector<nn::MicroBatch> batches;
  const at::Tensor on_device = ids.to(context_.device);
  for (std::int64_t m = 0; m < steps; ++m)
    batches.push_back(nn::micro_batch_of(on_device[m], context_.inputs.document_end));
  return batches;
}

}  // namespace fedshard::train
