// A round: what the groups do together every K steps.
//
// In order: propose (the coordinator names participants and their tokens), guard, exchange out of place, ready, COMMIT
// (the coordinator has named one list of participants for all shards), outer step, new parameters to every replica,
// digest. Until the commit nothing is changed, so a round happens for everyone with the same participants, or not at
// all.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fedshard/base/clock.h"
#include "fedshard/control/client.h"
#include "fedshard/federation/compressed_exchange.h"
#include "fedshard/federation/exchange.h"
#include "fedshard/federation/guard.h"
#include "fedshard/federation/outer_state.h"
#include "fedshard/federation/weights.h"
#include "fedshard/shard/engine.h"

namespace fedshard::federation {

struct FederationOptions {
  WeightPolicy weights;
  OuterOptions outer;
  plan::Compression compression;  // of what groups have changed; none: their parameters are averaged as they are
  double guard = 10;              // faults_of's limit (guard.h)
};

struct RoundInput {
  std::int64_t round = 1;   // counted from 1
  std::int64_t step = 0;    // updates done
  std::int64_t tokens = 0;  // of this group, since the last round
  bool wants_stop = false;  // this rank would like the run to end here
};

struct RoundOutcome {
  std::vector<double> weights;  // by group; 0 of those left out
  std::vector<int> left_out;    // groups that the guard kept from the average, which they receive like the others
  std::uint64_t digest = 0;     // of the new parameters, equal in all groups
  double seconds = 0;
  bool stop = false;  // some rank wanted to stop: all end after this round
};

// The federation as one rank sees it. Not safe from several threads.
class Federation {
 public:
  // The references must outlive the federation.
  Federation(const topology::Layout& layout, int rank, const FederationOptions& options, shard::Engine& engine,
             comm::Axes& axes, control::CoordinatorClient& coordinator, shard::StateRegistry& registry);

  // Makes the engine's present parameters the anchor of the first round. All groups must hold the same.
  void set_anchor();

  // The groups' weighted mean, and the outer step from it: afterwards every rank of every group holds its part of the
  // same new parameters. Throws PeersLostError where somebody fails before the commit (parameters and outer state are
  // then the old ones) or after it, RunError where no group is sound, where the outer step leads to numbers that
  // are not finite, or where groups or replicas end with different parameters.
  RoundOutcome run_round(const RoundInput& input);

  // The groups' weighted mean, by the tokens since the last round, in an arena of its own; no state is touched. The
  // engine's own parameters where no group has trained since the last round. Collective over the world.
  shard::Arena mean_parameters(std::int64_t tokens_since_round);

 private:
  std::vector<Contribution> contributions();
  std::vector<bool> judge(std::int64_t round);
  at::Tensor mean_of(std::span<const double> weights);
  double pseudo_gradient_norm(const at::Tensor& mean);
  at::Tensor outer_step(const at::Tensor& mean, std::int64_t round, double norm);
  std::uint64_t digest_of_group();

  const topology::Layout& layout_;
  FederationOptions options_;
  shard::Engine& engine_;
  comm::Axes& axes_;
  control::CoordinatorClient& coordinator_;
  Exchange exchange_;
  OuterState outer_;
  std::optional<CompressedExchange> compressed_;
  base::SteadyClock clock_;
};

}  // namespace fedshard::federation
