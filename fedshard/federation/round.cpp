#include "fedshard/federation/round.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>

#include "fedshard/base/error.h"
#include "fedshard/base/log.h"
#include "fedshard/shard/digest.h"

namespace fedshard::federation {
namespace {

double square_norm_of(const at::Tensor& values) {
  const at::Tensor wide = values.to(at::kFloat);
  const float* v = wide.const_data_ptr<float>();
  double square = 0;
  for (std::int64_t i = 0; i < wide.numel(); ++i) square += static_cast<double>(v[i]) * v[i];
  return square;
}

}  // namespace

Federation::Federation(const topology::Layout& layout, int rank, const FederationOptions& options,
                       shard::Engine& engine, comm::Axes& axes, control::CoordinatorClient& coordinator,
                       shard::StateRegistry& registry)
    : layout_(layout),
      options_(options),
      engine_(engine),
      axes_(axes),
      coordinator_(coordinator),
      exchange_(layout, rank, engine.plan(), engine.map(), axes),
      outer_(options.outer, options.compression.kind != plan::Compression::Kind::none,
             exchange_.slice_map(engine.map()), registry) {
  if (options.compression.kind != plan::Compression::Kind::none) {
    compressed_.emplace(options.compression, exchange_, exchange_.slice_map(engine.map()), axes, registry);
  }
}

void Federation::set_anchor() {
  if (outer_.keeps_anchor()) outer_.set_anchor(exchange_.slice_of(engine_.parameters()));
}

RoundOutcome Federation::run_round(const RoundInput& input) {
  const double begin = clock_.now();
  const control::RoundPlan plan = coordinator_.propose(input.round, input.tokens, input.wants_stop);
  base::require(static_cast<int>(plan.participants.size()) == layout_.groups(),
                "round {} has {} participants of {} groups", input.round, plan.participants.size(), layout_.groups());
  RoundOutcome outcome;
  outcome.stop = plan.stop;
  const std::vector<bool> left_out = judge(input.round);
  for (int group = 0; group < layout_.groups(); ++group) {
    if (left_out[group]) outcome.left_out.push_back(group);
  }
  outcome.weights = weights_of(options_.weights, plan.tokens, left_out);

  const at::Tensor mean = mean_of(outcome.weights);
  const double drift_square = exchange_.square_distance(engine_.parameters(), mean);
  const double norm = pseudo_gradient_norm(mean);

  const control::Commit commit = coordinator_.ready(input.round, plan.epoch);
  base::require(commit.participants == plan.participants, "round {} was committed with other participants than planned",
                input.round);
  if (compressed_) compressed_->commit();
  exchange_.spread(outer_step(mean, input.round, norm), engine_.parameters(), comm::Purpose::aggregate);
  outcome.seconds = clock_.now() - begin;

  // Nothing is hidden behind computation: all seconds are exposed.
  const control::RoundMeasures measures{input.step,      outcome.weights, outcome.left_out,
                                        outcome.seconds, outcome.seconds, drift_square};
  outcome.digest = coordinator_.digest(input.round, digest_of_group(), measures).digest;
  return outcome;
}

// This rank's slice of it. Nothing is changed yet.
at::Tensor Federation::mean_of(std::span<const double> weights) {
  if (!compressed_) return exchange_.mean_of(engine_.parameters(), weights, comm::Purpose::aggregate);
  const at::Tensor change = outer_.change_of(exchange_.slice_of(engine_.parameters()));
  return outer_.changed_by(compressed_->mean_of(change, weights, comm::Purpose::aggregate));
}

// Of what each group brings: its parameters, or with an outer optimizer their distance from the anchor.
std::vector<Contribution> Federation::contributions() {
  const at::Tensor slice = exchange_.slice_of(engine_.parameters());
  std::array<double, 2> sums{outer_.keeps_anchor() ? outer_.square_distance(slice) : square_norm_of(slice), 0.0};
  if (axes_.replica->size() > 1) {
    const auto digests =
        axes_.replica->collect(shard::halves_of(shard::partial_digest(engine_.plan(), engine_.parameters())));
    for (const auto& of_replica : digests) sums[1] += of_replica != digests[0];
  }
  axes_.group->sum(sums);
  std::vector<Contribution> all;
  for (const auto& of_group : comm::collect_by_group(axes_, sums)) all.push_back({of_group[0], of_group[1] > 0});
  return all;
}

// By group, whether it is left out of the round; the same on every rank.
std::vector<bool> Federation::judge(std::int64_t round) {
  const std::vector<std::string> faults = faults_of(contributions(), options_.guard);
  std::vector<bool> left_out;
  std::string said;
  for (std::size_t group = 0; group < faults.size(); ++group) {
    left_out.push_back(!faults[group].empty());
    if (left_out.back()) said += fmt::format("{}group {}: {}", said.empty() ? "" : "; ", group, faults[group]);
  }
  if (said.empty()) return left_out;
  if (std::find(left_out.begin(), left_out.end(), false) == left_out.end()) {
    base::fail<base::RunError>("round {}: no group is left to be averaged: {}", round, said);
  }
  base::log_error("round {} leaves out {}; it receives the average of the others", round, said);
  return left_out;
}

// The new parameters of this rank's slice.
at::Tensor Federation::outer_step(const at::Tensor& mean, std::int64_t round, double norm) {
  const at::Tensor parameters = outer_.step(mean, norm, engine_.parameters().dtype());
  // What groups bring is sound, so only the step itself can have led there.
  if (outer_.keeps_anchor() && !at::isfinite(parameters).all().item<bool>()) {
    base::fail<base::RunError>(
        "round {}: the outer step leads to parameters that are not finite: lower [federation] outer_lr or set "
        "outer_max_norm",
        round);
  }
  return parameters;
}

// The same on every rank of the world, to the bit: groups of other shapes would add up in another order.
double Federation::pseudo_gradient_norm(const at::Tensor& mean) {
  if (options_.outer.max_norm == 0) return 0;
  std::array<double, 1> square{outer_.square_distance(mean)};
  axes_.group->sum(square);
  return std::sqrt(comm::collect_by_group(axes_, square)[0][0]);
}

// This rank's summand of its group's digest: the first replica's ranks count, the others must agree with them.
std::uint64_t Federation::digest_of_group() {
  const std::uint64_t digest = shard::partial_digest(engine_.plan(), engine_.parameters());
  const auto by_replica = axes_.replica->collect(shard::halves_of(digest));
  for (std::size_t replica = 0; replica < by_replica.size(); ++replica) {
    if (by_replica[replica] != by_replica[0]) {
      base::fail<base::RunError>(
          "ranks {} and {} are replicas of one shard but hold different parameters after the round",
          axes_.replica->members().ranks[0], axes_.replica->members().ranks[replica]);
    }
  }
  return axes_.replica->index() == 0 ? digest : 0;
}

shard::Arena Federation::mean_parameters(std::int64_t tokens_since_round) {
  const std::vector<double> mine{static_cast<double>(tokens_since_round)};
  std::vector<std::int64_t> tokens;
  for (const auto& of_group : comm::collect_by_group(axes_, mine)) {
    tokens.push_back(static_cast<std::int64_t>(of_group[0]));
  }
  shard::Arena mean(engine_.map(), engine_.parameters().dtype());
  mean.flat().copy_(engine_.parameters().flat());  // of which frozen units stay
  if (std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}) > 0) {
    exchange_.spread(
        exchange_.mean_of(engine_.parameters(), weights_of(options_.weights, tokens), comm::Purpose::state), mean,
        comm::Purpose::state);
  }
  return mean;
}

}  // namespace fedshard::federation
