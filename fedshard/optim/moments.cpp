#include "fedshard/optim/moments.h"

#include <algorithm>

namespace fedshard::optim {

Moments::Moments(const std::vector<std::string>& names, const plan::UpdateRules& rules, shard::Engine& engine,
                 shard::StateRegistry& registry) {
  const shard::ArenaMap& whole = engine.map();
  int least = 2, most = 0;
  for (const auto& of_unit : rules) {
    for (const plan::UpdateRule& rule : of_unit) {
      least = std::min(least, plan::moments_of(rule.update));
      most = std::max(most, plan::moments_of(rule.update));
    }
  }
  for (int m = 0; m < most; ++m) {
    const shard::ArenaMap* map = &whole;
    if (m >= least) {
      maps_.push_back(std::make_unique<shard::ArenaMap>(
          whole, plan::moment_ranges(engine.plan(), rules, m + 1, whole.shards(), whole.shard())));
      map = maps_.back().get();
    }
    arenas_.push_back(std::make_unique<shard::Arena>(*map));
    registry.add(names.at(m), shard::Role::moments, shard::Scope::group, *arenas_.back());
  }
}

}  // namespace fedshard::optim
