#include "fedshard/federation/outer_state.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/plan/outer.h"

namespace fedshard::federation {

OuterState::OuterState(const OuterOptions& options, bool asked_for_changes, shard::ArenaMap slice,
                       shard::StateRegistry& registry, const std::string& suffix)
    : options_((plan::check_options(options), options)), slice_(std::move(slice)) {
  if (!plan::needs_anchor(options) && !asked_for_changes) return;
  anchor_ = std::make_unique<shard::Arena>(slice_);
  registry.add("anchor" + suffix, shard::Role::anchor, shard::Scope::shared, *anchor_);
  for (int m = 0; m < plan::outer_moments_of(options.outer); ++m) {
    moments_.push_back(std::make_unique<shard::Arena>(slice_));
    moments_.back()->flat().fill_(plan::initial_moment(options, m));
    registry.add(fmt::format("outer_{}{}", m, suffix), shard::Role::outer_moments, shard::Scope::shared,
                 *moments_.back());
  }
}

void OuterState::set_anchor(const at::Tensor& parameters) {
  if (!keeps_anchor()) return;
  anchor_->flat().copy_(parameters);
  has_anchor_ = true;
}

double OuterState::square_distance(const at::Tensor& values) const {
  base::require(has_anchor_, "the outer optimizer has no anchor yet");
  const at::Tensor wide = values.to(at::kFloat);
  const float *x = anchor_->flat().const_data_ptr<float>(), *y = wide.const_data_ptr<float>();
  double square = 0;
  for (std::int64_t i = 0; i < wide.numel(); ++i) {
    const double difference = static_cast<double>(x[i]) - y[i];
    square += difference * difference;
  }
  return square;
}

ChangeSums OuterState::change_sums(const at::Tensor& parameters, const at::Tensor& mean) const {
  base::require(has_anchor_, "the outer optimizer has no anchor yet");
  const at::Tensor wide = parameters.to(at::kFloat), wide_mean = mean.to(at::kFloat);
  const float* x = anchor_->flat().const_data_ptr<float>();
  const float *p = wide.const_data_ptr<float>(), *m = wide_mean.const_data_ptr<float>();
  ChangeSums sums{0, 0, 0};
  for (std::int64_t i = 0; i < wide.numel(); ++i) {
    const double mine = static_cast<double>(x[i]) - p[i], all = static_cast<double>(x[i]) - m[i];
    sums.square += mine * mine;
    sums.with_mean += mine * all;
    sums.mean_square += all * all;
  }
  return sums;
}

at::Tensor OuterState::change_of(const at::Tensor& parameters) const {
  base::require(has_anchor_, "the outer optimizer has no anchor yet");
  const c10::NoGradGuard no_grad;
  return anchor_->flat() - parameters.to(at::kFloat);
}

at::Tensor OuterState::changed_by(const at::Tensor& change) const {
  base::require(has_anchor_, "the outer optimizer has no anchor yet");
  const c10::NoGradGuard no_grad;
  at::Tensor parameters = anchor_->flat().clone();
  float* p = parameters.mutable_data_ptr<float>();
  const float* d = change.const_data_ptr<float>();
  for (std::int64_t i = 0; i < change.numel(); ++i) {
    if (d[i] != 0) p[i] -= d[i];  // -0 - (-0) would be +0
  }
  return parameters;
}

at::Tensor OuterState::step(const at::Tensor& mean, double norm, at::ScalarType dtype) {
  if (!keeps_anchor()) return mean.to(dtype);
  base::require(has_anchor_, "the outer optimizer has no anchor yet");
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> moments;
  for (const auto& arena : moments_) moments.push_back(arena->flat());
  at::Tensor parameters = anchor_->flat();
  outer_step(options_, parameters, mean.to(at::kFloat), moments, clip_factor(options_, norm));
  const at::Tensor rounded = parameters.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  parameters.copy_(rounded);
  return rounded;
}

}  // namespace fedshard::federation
