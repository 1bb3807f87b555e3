// The arenas of an optimizer's moments, registered for checkpoints.
//
// No element pays for a moment that its update does not have: where only some have one, its arena holds those alone.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "fedshard/plan/updates.h"
#include "fedshard/shard/engine.h"
#include "fedshard/shard/state.h"

namespace fedshard::optim {

class Moments {
 public:
  // names[m]: of moment m in the registry. There are as many as the rules need, in fp32 on `device`, zero at first.
  // `engine` and `registry` must outlive them, and they what is registered.
  Moments(const std::vector<std::string>& names, const plan::UpdateRules& rules, shard::Engine& engine,
          at::Device device, shard::StateRegistry& registry);
  int count() const { return static_cast<int>(arenas_.size()); }
  void clear();  // to zero
  const shard::Arena& arena(int moment) const { return *arenas_[moment]; }

 private:
  shard::ArenaMap whole_;                               // the parameters' places, on the moments' device
  std::vector<std::unique_ptr<shard::ArenaMap>> maps_;  // of those that not every element has
  std::vector<std::unique_ptr<shard::Arena>> arenas_;
};

}  // namespace fedshard::optim
