// One fragment of the model, which is exchanged at once: what a rank brings of it to a round, how the groups' mean
// comes about, and what its rounds keep. With one fragment (the usual case) it is the whole model.
//
// A surprise: nothing here knows whether training goes on meanwhile. What a round reads is either the engine's
// parameters or a copy of this rank's slice of them, and both are arenas in which the slice lies.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fedshard/federation/compressed_exchange.h"
#include "fedshard/federation/exchange.h"
#include "fedshard/federation/guard.h"
#include "fedshard/federation/outer_state.h"
#include "fedshard/shard/engine.h"

namespace fedshard::federation {

class Fragment {
 public:
  // plan: the fragment's (plan::fragment_plans). keeps_anchor: also where nothing but measures needs one. The state's
  // names end with `suffix`. `engine`, `axes` and `registry` must outlive it.
  Fragment(const topology::Layout& layout, int rank, const topology::ExchangeRules& rules, const OuterOptions& outer,
           const plan::Compression& compression, bool keeps_anchor, const shard::Engine& engine, comm::Axes& axes,
           plan::ModelPlan plan, const std::string& suffix, shard::StateRegistry& registry);

  const plan::ModelPlan& plan() const { return plan_; }
  Exchange& exchange() { return exchange_; }
  const shard::ArenaMap& shard_map() const { return shard_map_; }  // of what the group's replicas hold together
  void set_anchor(const shard::Arena& parameters);
  bool keeps_anchor() const { return outer_.keeps_anchor(); }

  // This rank's slice, in an arena of its own on the host.
  std::unique_ptr<shard::Arena> copy_of_slice(const shard::Arena& parameters) const;

  // By group: what each brings, its parameters or where an anchor is kept their distance from it. digest: of this
  // rank's whole shard, which its replicas must share. is_finite: whether all else is that this rank brings; where not,
  // neither is its group's norm. Collective over the world.
  std::vector<Contribution> contributions(const shard::Arena& parameters, std::uint64_t digest, bool is_finite = true);

  // The groups' weighted mean of this rank's slice: [n] on the CPU. Nothing is changed yet. Collective over the
  // federation axis, and over the world where pseudo-gradients are clipped.
  at::Tensor mean_of(const shard::Arena& parameters, std::span<const double> weights);

  // Not numbers where no anchor is kept.
  ChangeSums change_sums(const shard::Arena& parameters, const at::Tensor& mean) const;

  // Where the outer step leads from the last mean, of all that the group's replicas hold together: what
  // exchange().write() writes. Nothing is changed yet. Throws RunError where these are not finite numbers. Collective
  // over the replica axis.
  at::Tensor next_parameters(const at::Tensor& mean, std::int64_t round);
  // After the commit: the state takes the same step.
  void commit(const at::Tensor& mean);

 private:
  double pseudo_gradient_norm(const at::Tensor& mean);

  OuterOptions options_;
  comm::Axes& axes_;
  plan::ModelPlan plan_;
  Exchange exchange_;
  shard::ArenaMap slice_map_, shard_map_;
  at::ScalarType dtype_;
  OuterState outer_;
  std::optional<CompressedExchange> compressed_;
  at::Tensor room_;  // of the last mean, where that is the new parameters already
  double norm_ = 0;  // of the last mean's pseudo-gradient, where they are clipped
};

}  // namespace fedshard::federation
