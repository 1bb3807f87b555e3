// The registry of all sharded state of a run. Whoever owns state registers it here once; checkpoints, digests and the
// memory table iterate over the registry and keep no lists of their own.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fedshard/shard/arena.h"

namespace fedshard::shard {

enum class Role { parameters, gradients, moments, anchor, outer_moments, residuals };
const char* name_of(Role role);

// Who else holds the same values: all groups after a round, only the replicas of one group, or nobody. What is a
// slice's lies on one replica alone, whatever its scope, unless replicas exchange the same (topology::Scheme::naive).
enum class Scope { shared, group, rank };

struct State {
  std::string name;  // "parameters", "exp_avg"
  Role role = Role::parameters;
  Scope scope = Scope::group;
  const Arena* arena = nullptr;
  // Of the elements of one unit: groups share nothing that is group-local, whatever `scope` says of the others.
  Scope scope_of(int unit) const;
};

class StateRegistry {
 public:
  // `arena` must outlive the registry's use. Throws where the name is taken.
  void add(std::string name, Role role, Scope scope, const Arena& arena);
  const std::vector<State>& all() const { return states_; }
  std::int64_t bytes(Role role) const;

 private:
  std::vector<State> states_;
};

}  // namespace fedshard::shard
