#include "fedshard/federation/proximal.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "fedshard/base/error.h"

namespace fedshard::federation {

Proximal::Proximal(double mu, const shard::Engine& engine, shard::StateRegistry& registry)
    : mu_(mu),
      engine_(engine),
      map_(engine.plan(), engine.map().shards(), engine.map().shard(), shard::ArenaRoom::trained_units,
           engine.device()),
      anchor_(map_, engine.parameters().dtype()) {
  base::require(mu > 0, "a proximal term with mu = {}", mu);
  registry.add("prox_anchor", shard::Role::anchor, shard::Scope::shared, anchor_);
}

void Proximal::set_anchor(const shard::Arena& parameters, const plan::ModelPlan& plan) {
  const c10::NoGradGuard no_grad;
  for (const shard::ArenaPiece& piece : map_.pieces()) {
    if (!plan.units[piece.unit].is_exchanged()) continue;
    anchor_.real(piece.unit).copy_(parameters.slice(piece.unit, piece.range));
  }
  has_anchor_ = true;
}

void Proximal::add_term(int unit) const {
  base::require(has_anchor_, "the proximal term has no anchor yet");
  if (!engine_.plan().units[unit].is_exchanged()) return;
  const c10::NoGradGuard no_grad;
  const at::Tensor gradient = engine_.gradients().real(unit), parameters = engine_.parameters().real(unit),
                   anchor = anchor_.real(unit);
  // So many elements at a time, because each takes a few bytes beside the arenas while it is at work.
  constexpr std::int64_t kChunk = std::int64_t{1} << 16;
  for (std::int64_t begin = 0; begin < gradient.numel(); begin += kChunk) {
    const std::int64_t size = std::min(kChunk, gradient.numel() - begin);
    const auto chunk = [&](const at::Tensor& values) { return values.narrow(0, begin, size); };
    chunk(gradient).add_(chunk(parameters).to(at::kFloat) - chunk(anchor).to(at::kFloat), mu_);
  }
}

}  // namespace fedshard::federation
