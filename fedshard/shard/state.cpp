#include "fedshard/shard/state.h"

#include <ATen/ATen.h>

#include "fedshard/base/error.h"

namespace fedshard::shard {

const char* name_of(Role role) {
  constexpr const char* kNames[] = {"parameters", "gradients", "moments", "anchor", "outer_moments", "residuals"};
  return kNames[static_cast<int>(role)];
}

Scope State::scope_of(int unit) const {
  return scope == Scope::shared && arena->map().group_local(unit) ? Scope::group : scope;
}

void StateRegistry::add(std::string name, Role role, Scope scope, const Arena& arena) {
  for (const State& state : states_) base::require(state.name != name, "state '{}' is registered twice", name);
  states_.push_back({std::move(name), role, scope, &arena});
}

std::int64_t StateRegistry::bytes(Role role) const {
  std::int64_t bytes = 0;
  for (const State& state : states_) {
    if (state.role == role) bytes += static_cast<std::int64_t>(state.arena->flat().nbytes());
  }
  return bytes;
}

}  // namespace fedshard::shard
