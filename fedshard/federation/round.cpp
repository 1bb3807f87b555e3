#include "fedshard/federation/round.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fedshard/base/error.h"
#include "fedshard/shard/digest.h"

namespace fedshard::federation {

Federation::Federation(const topology::Layout& layout, int rank, WeightPolicy policy, shard::Engine& engine,
                       comm::Axes& axes, control::CoordinatorClient& coordinator)
    : layout_(layout),
      policy_(policy),
      engine_(engine),
      axes_(axes),
      coordinator_(coordinator),
      exchange_(layout, rank, engine.plan(), engine.map(), axes) {}

RoundOutcome Federation::run_round(const RoundInput& input) {
  const double begin = clock_.now();
  const control::RoundPlan plan = coordinator_.propose(input.round, input.tokens, input.wants_stop);
  base::require(static_cast<int>(plan.participants.size()) == layout_.groups(),
                "round {} has {} participants of {} groups", input.round, plan.participants.size(), layout_.groups());
  RoundOutcome outcome{weights_of(policy_, plan.tokens), 0, 0, plan.stop};

  const at::Tensor mean = exchange_.mean_of(engine_.parameters(), outcome.weights, comm::Purpose::aggregate);
  const double drift_square = exchange_.square_distance(engine_.parameters(), mean);

  const control::Commit commit = coordinator_.ready(input.round, plan.epoch);
  base::require(commit.participants == plan.participants, "round {} was committed with other participants than planned",
                input.round);
  exchange_.spread(mean, engine_.parameters(), comm::Purpose::aggregate);
  outcome.seconds = clock_.now() - begin;

  // Plain fedavg hides nothing behind computation: all of its seconds are exposed.
  const control::RoundMeasures measures{input.step, outcome.weights, outcome.seconds, outcome.seconds, drift_square};
  outcome.digest = coordinator_.digest(input.round, digest_of_group(), measures).digest;
  return outcome;
}

// This rank's summand of its group's digest: the first replica's ranks count, the others must agree with them.
std::uint64_t Federation::digest_of_group() {
  const std::uint64_t digest = shard::partial_digest(engine_.plan(), engine_.parameters());
  // As two halves, because numbers travel as doubles.
  const std::vector<double> halves{static_cast<double>(digest >> 32), static_cast<double>(digest & 0xffffffffu)};
  const auto by_replica = axes_.replica->collect(halves);
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
  for (const auto& of_group : axes_.federation->collect(mine)) tokens.push_back(static_cast<std::int64_t>(of_group[0]));
  shard::Arena mean(engine_.map(), engine_.parameters().dtype());
  mean.flat().copy_(engine_.parameters().flat());  // of which frozen units stay
  if (std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}) > 0) {
    exchange_.spread(exchange_.mean_of(engine_.parameters(), weights_of(policy_, tokens), comm::Purpose::state), mean,
                     comm::Purpose::state);
  }
  return mean;
}

}  // namespace fedshard::federation
