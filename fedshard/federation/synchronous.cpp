#include "fedshard/federation/synchronous.h"

#include <ATen/ATen.h>

#include <array>
#include <vector>

namespace fedshard::federation {
namespace {

// Of the parts of the slice that this rank's group owns; over all ranks of the world these are the whole model.
double owned_squares(const Exchange& exchange, const at::Tensor& slice) {
  if (!exchange.is_counted()) return 0;
  const at::Tensor wide = slice.to(at::kFloat);
  const float* values = wide.const_data_ptr<float>();
  double squares = 0;
  for (const Exchange::Part& part : exchange.parts()) {
    if (part.owner != exchange.group()) continue;
    for (std::int64_t i = part.offset; i < part.offset + part.range.size(); ++i) {
      squares += static_cast<double>(values[i]) * values[i];
    }
  }
  return squares;
}

}  // namespace

shard::StepSums sum_over_groups(Exchange& exchange, comm::Axes& axes, const shard::Arena& gradients,
                                const shard::StepSums& of_group) {
  const std::vector<double> ones(axes.group_members.size(), 1.0);
  const at::Tensor sums_of_all = exchange.gathered_mean_of(gradients, ones, comm::Purpose::aggregate);
  exchange.write(sums_of_all, gradients);
  std::array<double, 1> squares{owned_squares(exchange, exchange.own(sums_of_all))};
  axes.group->sum(squares);
  std::array<double, 3> sums{of_group.loss, of_group.tokens, squares[0]};
  comm::sum_over_groups(axes, sums);
  return {sums[0], sums[1], sums[2]};
}

}  // namespace fedshard::federation
