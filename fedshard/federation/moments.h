// What the groups' inner optimizers remember, averaged at a round as their parameters are.
//
// Parameters that jump to the mean no longer fit the moments that led each group elsewhere. The mean of the moments is
// what one optimizer would remember that had seen all groups' gradients, at one more exchange of their size. (Compare
// Chen et al., arXiv 2109.05109, where local AMSGrad shares its second moments.)
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fedshard/federation/exchange.h"
#include "fedshard/shard/state.h"

namespace fedshard::federation {

class MomentsAverage {
 public:
  // All moments in the registry, of what rounds of `plan` exchange. The moments and `axes` must outlive it. Throws
  // UsageError where there are none.
  MomentsAverage(const topology::Layout& layout, int rank, const plan::ModelPlan& plan, comm::Axes& axes,
                 const topology::ExchangeRules& rules, const shard::StateRegistry& registry);

  // Whether this rank's are all finite numbers.
  bool are_finite() const;

  // Their weighted mean over the groups, out of place. updates: how many this group's are of; returns how many their
  // mean counts as, the mean of the groups' rounded to a whole number, the same everywhere. Collective over the world.
  std::int64_t exchange(std::int64_t updates, std::span<const double> weights);

  // Takes the last exchange's over, after the commit. Nobody else is asked.
  void commit();

 private:
  struct Moment {
    const shard::Arena* arena;
    Exchange exchange;
    at::Tensor next = {};  // exchange.room, until the commit
  };
  comm::Axes& axes_;
  std::vector<std::unique_ptr<Moment>> moments_;
};

}  // namespace fedshard::federation
