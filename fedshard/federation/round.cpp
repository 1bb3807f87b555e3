#include "fedshard/federation/round.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/base/log.h"
#include "fedshard/federation/synchronous.h"
#include "fedshard/shard/digest.h"

namespace fedshard::federation {

// A round that has begun and not finished. The thread that exchanges and the one that trains never use it at once.
struct Federation::Pending {
  RoundInput input;
  double began = 0, exposed = 0, exchanged = 0;  // seconds: of the clock, in all, of the clock
  // Of what the rank has brought, and of what is local to its group, where there are replicas.
  std::uint64_t shard_digest = 0, group_local_digest = 0;
  std::unique_ptr<shard::Arena> brought, next;  // with a delay: its slice, and the new parameters of its shard
  RoundOutcome outcome;
  control::RoundMeasures measures;
  std::uint64_t digest = 0;  // this rank's part
  comm::WorkPtr work;        // with a delay
};

metrics::TrafficRecord record_of(const comm::Traffic& traffic) {
  const auto of = [&](comm::Purpose purpose) { return traffic.of(purpose); };
  metrics::TrafficRecord record;
  record.intra_group = traffic.intra_group;
  record.inter_group = traffic.inter_group;
  record.gather = of(comm::Purpose::gather);
  record.reduce = of(comm::Purpose::reduce);
  record.replica = of(comm::Purpose::replica);
  record.aggregate = of(comm::Purpose::aggregate);
  record.state = of(comm::Purpose::state);
  record.control = of(comm::Purpose::control);
  return record;
}

Federation::Federation(const topology::Layout& layout, int rank, const FederationOptions& options,
                       shard::Engine& engine, comm::Axes& axes, control::CoordinatorClient& coordinator,
                       shard::StateRegistry& registry, RoundLinks links)
    : layout_(layout),
      options_((plan::check_rounds(options.rounds), options)),
      engine_(engine),
      axes_(axes),
      links_(links),
      coordinator_(coordinator),
      whole_(layout, rank, engine.plan(), engine.map(), axes, options.exchange) {
  // A run of one group makes no rounds.
  base::require(options.rounds.delay == 0 || layout.groups() == 1 || &links.axes != &axes,
                "rounds with a delay need axes of their own");
  const auto fragments = plan::fragment_plans(engine.plan(), options.rounds.fragments);
  for (std::size_t f = 0; f < fragments.size(); ++f) {
    fragments_.push_back(std::make_unique<Fragment>(
        layout, rank, options.exchange, options.outer, options.compression, options.measures, engine, links_.axes,
        fragments[f], fragments.size() == 1 ? "" : fmt::format(" of fragment {}", f), registry));
  }
  if (options.rounds.delay > 0) background_ = std::make_unique<comm::Worker>();
  if (options.average_moments && layout.groups() > 1) {
    base::require(options.rounds.delay == 0 && options.rounds.fragments == 1,
                  "moments are averaged in rounds of the whole model");
    moments_.emplace(layout, rank, engine.plan(), axes, options.exchange, registry);
  }
  if (options.prox_mu > 0 && layout.groups() > 1) proximal_.emplace(options.prox_mu, engine, registry);
}

Federation::~Federation() = default;

void Federation::set_anchor() {
  for (const auto& fragment : fragments_) fragment->set_anchor(engine_.parameters());
  if (proximal_) proximal_->set_anchor(engine_.parameters(), engine_.plan());
}

shard::GradientHooks Federation::local_step() {
  if (!proximal_) return {};
  return {.add_to_mean = [this](int unit) { proximal_->add_term(unit); }};
}

shard::GradientHooks Federation::synchronous_step() {
  return {.sum_over_groups = [this](const shard::Arena& sums, const shard::StepSums& of_group) {
    return sum_over_groups(whole_, axes_, sums, of_group);
  }};
}

void Federation::end_warm_up() {
  std::vector<double> the_first(static_cast<std::size_t>(layout_.groups()), 0.0);
  the_first[0] = 1;
  whole_.write(whole_.gathered_mean_of(engine_.parameters(), the_first, comm::Purpose::aggregate),
               engine_.parameters());
  set_anchor();
}

void Federation::begin_round(const RoundInput& input) {
  base::require(!is_under_way(), "round {} begins before the one before it is over", input.round);
  const double begin = clock_.now();
  const Fragment& fragment = *fragments_.at(static_cast<std::size_t>(input.fragment));
  pending_ = std::make_unique<Pending>();
  pending_->input = input;
  pending_->began = begin;
  if (links_.axes.replica->size() > 1) {
    pending_->shard_digest = shard::partial_digest(fragment.plan(), engine_.parameters());
    pending_->group_local_digest = shard::partial_group_local_digest(engine_.plan(), engine_.parameters());
  }
  if (!overlaps()) return;
  pending_->brought = fragment.copy_of_slice(engine_.parameters());
  pending_->work = background_->run([this, round = pending_.get()] { exchange(*round); });
  pending_->exposed = clock_.now() - begin;
}

RoundOutcome Federation::finish_round() {
  base::require(is_under_way(), "no round is under way");
  const std::unique_ptr<Pending> round = std::move(pending_);
  const double begin = overlaps() ? clock_.now() : round->began;
  overlaps() ? round->work->wait() : exchange(*round);
  RoundOutcome& outcome = round->outcome;
  const int group = layout_.group_of(axes_.group->members().rank());
  const bool left_out = std::count(outcome.left_out.begin(), outcome.left_out.end(), group) > 0;
  const double taking = clock_.now();
  if (overlaps()) take_over(*round, left_out ? 0 : options_.mix);
  if (proximal_) {
    const Fragment& fragment = *fragments_[static_cast<std::size_t>(round->input.fragment)];
    proximal_->set_anchor(overlaps() ? *round->next : engine_.parameters(), fragment.plan());
  }
  const double now = clock_.now();
  outcome.exposed_seconds = round->exposed + (now - begin);
  // Not less than what was waited for: a thread that waits is woken a little later.
  outcome.seconds = std::max(round->exchanged - round->began + (now - taking), outcome.exposed_seconds);
  round->measures.seconds = outcome.seconds;
  round->measures.exposed_seconds = outcome.exposed_seconds;
  const auto compare = [this, number = round->input.round, digest = round->digest, measures = round->measures] {
    return coordinator_.digest(number, digest, measures).digest;
  };
  if (overlaps()) {
    compared_ = background_->run([compare] { compare(); });
  } else {
    outcome.digest = compare();
  }
  return outcome;
}

void Federation::settle() {
  if (compared_) compared_->wait();
}

RoundOutcome Federation::run_round(const RoundInput& input) {
  begin_round(input);
  return finish_round();
}

// All of a round but taking over. Beside training where there is a delay.
void Federation::exchange(Pending& round) {
  const RoundInput& input = round.input;
  Fragment& fragment = *fragments_[static_cast<std::size_t>(input.fragment)];
  const shard::Arena& parameters = round.brought ? *round.brought : engine_.parameters();
  const control::RoundPlan plan = coordinator_.propose(input.round, input.steps, input.tokens, input.wants_stop);
  base::require(static_cast<int>(plan.participants.size()) == layout_.groups(),
                "round {} has {} participants of {} groups", input.round, plan.participants.size(), layout_.groups());
  round.outcome.stop = plan.stop;
  round.outcome.steps = plan.steps;
  const std::vector<bool> left_out = judge(round, fragment);
  round.outcome.weights = weights_of(options_.weights, plan.tokens, left_out);
  if (moments_) round.outcome.updates = moments_->exchange(input.updates, round.outcome.weights);
  at::Tensor mean = fragment.mean_of(parameters, round.outcome.weights);
  round.measures.drift_square = fragment.exchange().square_distance(parameters, mean);
  const ChangeSums changes = fragment.change_sums(parameters, mean);
  round.brought.reset();
  at::Tensor next = fragment.next_parameters(mean, input.round);

  const control::Commit commit = coordinator_.ready(input.round, plan.epoch);
  base::require(commit.participants == plan.participants, "round {} was committed with other participants than planned",
                input.round);
  // What can fail is behind: from here on every rank that is alive comes to the new parameters.
  fragment.commit(mean);
  if (moments_) moments_->commit();
  mean.reset();
  if (overlaps()) round.next = std::make_unique<shard::Arena>(fragment.shard_map(), next.scalar_type());
  const shard::Arena& target = round.next ? *round.next : engine_.parameters();
  fragment.exchange().write(next, target);
  next.reset();
  round.digest = digest_of_group(fragment, target, round.group_local_digest);
  round.exchanged = clock_.now();
  // All go on from the step of the group that made most.
  round.measures.step = input.step - input.steps + *std::max_element(plan.steps.begin(), plan.steps.end());
  round.measures.fragment = input.fragment;
  round.measures.weights = round.outcome.weights;
  round.measures.left_out = round.outcome.left_out;
  round.measures.change_square = changes.square;
  round.measures.change_with_mean = changes.with_mean;
  round.measures.mean_change_square = changes.mean_square;
  comm::Traffic traffic = input.traffic;
  if (links_.traffic != nullptr) traffic += links_.traffic->read();
  round.measures.traffic = record_of(traffic);
}

// By group, whether it is left out of the round; the same on every rank.
std::vector<bool> Federation::judge(Pending& round, Fragment& fragment) {
  const shard::Arena& parameters = round.brought ? *round.brought : engine_.parameters();
  const std::vector<std::string> faults = faults_of(
      fragment.contributions(parameters, round.shard_digest, !moments_ || moments_->are_finite()), options_.guard);
  std::vector<bool> left_out;
  std::string said;
  for (std::size_t group = 0; group < faults.size(); ++group) {
    left_out.push_back(!faults[group].empty());
    if (!left_out.back()) continue;
    round.outcome.left_out.push_back(static_cast<int>(group));
    said += fmt::format("{}group {}: {}", said.empty() ? "" : "; ", group, faults[group]);
  }
  if (said.empty()) return left_out;
  if (std::find(left_out.begin(), left_out.end(), false) == left_out.end()) {
    base::fail<base::RunError>("round {}: no group is left to be averaged: {}", round.input.round, said);
  }
  base::log_error("round {} leaves out {}; it receives the average of the others", round.input.round, said);
  return left_out;
}

// This rank's summand of its group's digest: the first replica's ranks count, the others must agree with them.
std::uint64_t Federation::digest_of_group(const Fragment& fragment, const shard::Arena& parameters,
                                          std::uint64_t group_local) {
  const std::uint64_t digest = shard::partial_digest(fragment.plan(), parameters);
  comm::Communicator& replica = *links_.axes.replica;
  // What is group-local has no part in it, but replicas hold that alike too, and no later round would mend it.
  const auto by_replica = replica.collect(shard::halves_of(digest + group_local));
  for (std::size_t r = 0; r < by_replica.size(); ++r) {
    if (by_replica[r] != by_replica[0]) {
      base::fail<base::RunError>(
          "ranks {} and {} are replicas of one shard but hold different parameters after the round",
          replica.members().ranks[0], replica.members().ranks[r]);
    }
  }
  return replica.index() == 0 ? digest : 0;
}

// parameters = mix parameters + (1 - mix) next, worked out in fp32. With mix 0 these are next's bits, whatever was
// there before.
void Federation::take_over(const Pending& round, double mix) {
  const c10::NoGradGuard no_grad;
  for (const shard::ArenaPiece& piece : round.next->map().pieces()) {
    const at::Tensor next = round.next->slice(piece.unit, piece.range);
    const at::Tensor mine = engine_.parameters().slice(piece.unit, piece.range);
    if (mix == 0) {
      mine.copy_(next);
    } else {
      mine.copy_(mine.to(at::kFloat).mul(mix).add_(next.to(mine.device(), at::kFloat), 1 - mix));
    }
  }
}

shard::Arena Federation::mean_parameters(std::int64_t tokens_since_round) {
  const std::vector<double> mine{static_cast<double>(tokens_since_round)};
  std::vector<std::int64_t> tokens;
  for (const auto& of_group : comm::collect_by_group(axes_, mine)) {
    tokens.push_back(static_cast<std::int64_t>(of_group[0]));
  }
  shard::Arena mean(engine_.map(), engine_.parameters().dtype());
  mean.flat().copy_(engine_.parameters().flat());  // of which frozen and group-local units stay
  const bool never_alike = options_.mix > 0 || fragments_.size() > 1;
  if (never_alike || std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}) > 0) {
    const std::vector<double> weights = weights_of(options_.weights, tokens);
    whole_.write(whole_.gathered_mean_of(engine_.parameters(), weights, comm::Purpose::state), mean);
  }
  return mean;
}

}  // namespace fedshard::federation
