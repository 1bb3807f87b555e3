#include "fedshard/federation/moments.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "fedshard/base/error.h"
#include "fedshard/federation/guard.h"

namespace fedshard::federation {

MomentsAverage::MomentsAverage(const topology::Layout& layout, int rank, const plan::ModelPlan& plan, comm::Axes& axes,
                               const topology::ExchangeRules& rules, const shard::StateRegistry& registry)
    : axes_(axes) {
  for (const shard::State& state : registry.all()) {
    if (state.role != shard::Role::moments) continue;
    moments_.push_back(
        std::make_unique<Moment>(Moment{state.arena, Exchange(layout, rank, plan, state.arena->map(), axes, rules)}));
  }
  if (moments_.empty()) base::fail<base::UsageError>("the inner optimizer has no moments to be averaged");
}

bool MomentsAverage::are_finite() const {
  return std::all_of(moments_.begin(), moments_.end(),
                     [](const auto& moment) { return all_finite(moment->arena->flat()); });
}

std::int64_t MomentsAverage::exchange(std::int64_t updates, std::span<const double> weights) {
  const std::vector<double> mine{static_cast<double>(updates)};
  double mean_updates = 0;
  std::size_t group = 0;
  for (const auto& of_group : comm::collect_by_group(axes_, mine)) mean_updates += weights[group++] * of_group[0];
  for (const auto& moment : moments_) {
    moment->next = moment->exchange.gathered_mean_of(*moment->arena, weights, comm::Purpose::aggregate);
  }
  return std::llround(mean_updates);
}

void MomentsAverage::commit() {
  for (const auto& moment : moments_) {
    base::require(moment->next.defined(), "no moments were exchanged that could be committed");
    moment->exchange.write(moment->next, *moment->arena);
    moment->next.reset();
  }
}

}  // namespace fedshard::federation
