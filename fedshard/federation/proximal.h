// FedProx's proximal term (Li et al., arXiv 1812.06127): between rounds every group minimises its loss
// + mu/2 ||w - anchor||^2, where the anchor is the parameters at the end of the last round. So groups whose data differ
// do not run too far apart.
//
// A surprise: this anchor is not the outer optimizer's. That one is a slice on the host for a round; this one is needed
// in every step, so it is the whole shard, on the device that computes, in the dtype of the parameters.
#pragma once
#include "fedshard/shard/engine.h"

namespace fedshard::federation {

class Proximal {
 public:
  // mu: more than 0. Registers "prox_anchor", of the units that train. The references must outlive it.
  Proximal(double mu, const shard::Engine& engine, shard::StateRegistry& registry);

  // Makes these the anchor, of what rounds of `plan` (the engine's, or a fragment's) exchange. parameters: an arena
  // that holds this rank's whole shard of it.
  void set_anchor(const shard::Arena& parameters, const plan::ModelPlan& plan);

  // Adds mu * (parameters - anchor), in fp32, to the gradient of a unit that trains: for
  // shard::GradientHooks::add_to_mean. Where the parameters are the anchor it adds zero; and nothing to what is
  // group-local, which rounds give no anchor.
  void add_term(int unit) const;

 private:
  double mu_;
  const shard::Engine& engine_;
  shard::ArenaMap map_;
  shard::Arena anchor_;
  bool has_anchor_ = false;
};

}  // namespace fedshard::federation
