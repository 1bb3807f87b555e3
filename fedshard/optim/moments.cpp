#include "fedshard/optim/moments.h"

namespace fedshard::optim {

Moments::Moments(const std::vector<std::string>& names, const plan::UpdateRules& rules, shard::Engine& engine,
                 at::Device device, shard::StateRegistry& registry)
    : whole_(engine.map().on(device)) {
  const auto [least, most] = plan::moment_counts(rules);
  for (int m = 0; m < most; ++m) {
    const shard::ArenaMap* map = &whole_;
    if (m >= least) {
      maps_.push_back(std::make_unique<shard::ArenaMap>(
          whole_, plan::moment_ranges(engine.plan(), rules, m + 1, whole_.shards(), whole_.shard())));
      map = maps_.back().get();
    }
    arenas_.push_back(std::make_unique<shard::Arena>(*map));
    registry.add(names.at(m), shard::Role::moments, shard::Scope::group, *arenas_.back());
  }
}

void Moments::clear() {
  for (const auto& arena : arenas_) arena->flat().zero_();
}

}  // namespace fedshard::optim
