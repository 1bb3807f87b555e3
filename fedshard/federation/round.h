// A round: what the groups do together every K steps.
//
// In order: propose (the coordinator names participants and their tokens), guard, exchange, outer step and new
// parameters to every replica, all out of place, ready, COMMIT (the coordinator has named one list of participants for
// all shards), taking over the new parameters and outer state, digest. Until the commit nothing is changed, and after
// it nobody needs anything from anybody, so a round happens for everyone with the same participants, or not at all.
//
// With a delay all of this runs beside training, on a thread and communicators of its own, from a copy of what the
// parameters were; only begin_round (the copy) and finish_round (waiting, where it is not over yet, and taking over the
// new parameters) take time from training.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fedshard/base/clock.h"
#include "fedshard/comm/worker.h"
#include "fedshard/control/client.h"
#include "fedshard/federation/fragment.h"
#include "fedshard/federation/moments.h"
#include "fedshard/federation/proximal.h"
#include "fedshard/federation/weights.h"
#include "fedshard/plan/rounds.h"

namespace fedshard::federation {

struct FederationOptions {
  WeightPolicy weights;
  OuterOptions outer;
  topology::ExchangeRules exchange;  // who brings what, and in which pieces
  plan::Compression compression;     // of what groups have changed; none: their parameters are averaged as they are
  double guard = 10;                 // faults_of's limit (guard.h)
  plan::RoundOptions rounds;
  double mix = 0;  // what a group keeps of its own parameters where it takes over the new ones; from 0 to below 1
  bool measures = false;         // keep an anchor even where only the measures of a round need it
  double prox_mu = 0;            // of FedProx's term (proximal.h); 0: none
  bool average_moments = false;  // of the inner optimizers too (moments.h); without delay and fragments
};

struct RoundInput {
  std::int64_t round = 1;    // counted from 1
  std::int64_t step = 0;     // steps done
  std::int64_t steps = 0;    // of this group, since the fragment's last round
  std::int64_t tokens = 0;   // likewise
  std::int64_t updates = 0;  // that the inner optimizer's moments are of; read where they are averaged
  bool wants_stop = false;   // this rank would like the run to end here
  int fragment = 0;
  comm::Traffic traffic = {};  // of this rank until now, but for what `RoundLinks::traffic` counts
};

struct RoundOutcome {
  std::vector<double> weights;      // by group; 0 of those left out
  std::vector<std::int64_t> steps;  // by group, since the fragment's last round
  std::vector<int> left_out;        // groups that the guard kept from the average, which they receive like the others
  std::int64_t updates = 0;         // that the inner optimizer's moments now count as, where they are averaged
  // Of the new parameters, equal in all groups; nothing where a delay leaves it to be compared beside training.
  std::optional<std::uint64_t> digest;
  double seconds = 0;          // from the begin to the new parameters, without training
  double exposed_seconds = 0;  // of them, those that training has waited
  bool stop = false;           // some rank wanted to stop: all end after this round
};

// What rounds talk over.
struct RoundLinks {
  comm::Axes& axes;  // training's own, but with a delay others, over which nothing else is sent
  const comm::TrafficCounter* traffic = nullptr;  // of these axes; null: not to be recorded
};

// As a record, without step and time.
metrics::TrafficRecord record_of(const comm::Traffic& traffic);

// The federation as one rank sees it. Not safe from several threads.
class Federation {
 public:
  // axes: training's. What is referred to and pointed to must outlive the federation.
  Federation(const topology::Layout& layout, int rank, const FederationOptions& options, shard::Engine& engine,
             comm::Axes& axes, control::CoordinatorClient& coordinator, shard::StateRegistry& registry,
             RoundLinks links);
  // Without a delay or a record of traffic: rounds over training's axes.
  Federation(const topology::Layout& layout, int rank, const FederationOptions& options, shard::Engine& engine,
             comm::Axes& axes, control::CoordinatorClient& coordinator, shard::StateRegistry& registry)
      : Federation(layout, rank, options, engine, axes, coordinator, registry, RoundLinks{axes}) {}
  ~Federation();

  // Makes the engine's present parameters the anchor of the first round. All groups must hold the same.
  void set_anchor();

  // What goes into the gradient of a step between rounds: nothing, or FedProx's term. Of a federation of one group
  // nothing. What is returned must not outlive the federation.
  shard::GradientHooks local_step();

  // The same of a step of all groups together (synchronous.h): of the warm-up, before the first round.
  shard::GradientHooks synchronous_step();

  // Ends the warm-up: all groups take the first one's parameters, which become the anchor. Theirs are the same but for
  // rounding: an optimizer's kernels may round an element otherwise in a shard of another size, or on another kind of
  // processor, and the first round's anchor must have the same bits everywhere. Collective over the world.
  void end_warm_up();

  // The groups' weighted mean, and the outer step from it. After finish_round every rank of every group holds its part
  // of the same new parameters, or with options.mix its own mixture of them and what it had. A rank may train between
  // the two where there is a delay. Both throw PeersLostError where somebody fails before the commit (parameters and
  // outer state are then the old ones) or after it, RunError where no group is sound, where the outer step leads to
  // numbers that are not finite, or where groups or replicas end with different parameters.
  void begin_round(const RoundInput& input);
  RoundOutcome finish_round();
  bool is_under_way() const { return pending_ != nullptr; }
  // Waits for what still runs beside training: the digests of the last round.
  void settle();
  RoundOutcome run_round(const RoundInput& input);  // both, without training between them

  // The groups' weighted mean, by the tokens since the last round, in an arena of its own; no state is touched. Where
  // no group has trained since the last round: the engine's own parameters, or where groups are never all alike (mix,
  // several fragments), the mean with equal tokens. Always the engine's own of what is group-local. Collective over the
  // world.
  shard::Arena mean_parameters(std::int64_t tokens_since_round);

 private:
  struct Pending;

  bool overlaps() const { return background_ != nullptr; }
  void exchange(Pending& round);
  std::vector<bool> judge(Pending& round, Fragment& fragment);
  std::uint64_t digest_of_group(const Fragment& fragment, const shard::Arena& parameters, std::uint64_t group_local);
  void take_over(const Pending& round, double mix);

  const topology::Layout& layout_;
  FederationOptions options_;
  shard::Engine& engine_;
  comm::Axes& axes_;
  RoundLinks links_;
  control::CoordinatorClient& coordinator_;
  Exchange whole_;  // over training's axes: for the mean in mid-round, and the warm-up
  std::vector<std::unique_ptr<Fragment>> fragments_;
  std::optional<Proximal> proximal_;
  std::optional<MomentsAverage> moments_;
  base::SteadyClock clock_;
  std::unique_ptr<Pending> pending_;
  comm::WorkPtr compared_;                    // the digests of the last round
  std::unique_ptr<comm::Worker> background_;  // last: it ends before what it works on
};

}  // namespace fedshard::federation
