#include "fedshard/federation/outer_state.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/federation/chunks.h"
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
  double square = 0;
  for (const topology::Range chunk : chunks_of(values.numel())) {
    const at::Tensor wide = values.narrow(0, chunk.begin, chunk.size()).to(at::kFloat);
    const float *x = anchor_->flat().const_data_ptr<float>() + chunk.begin, *y = wide.const_data_ptr<float>();
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      const double difference = static_cast<double>(x[i]) - y[i];
      square += difference * difference;
    }
  }
  return square;
}

ChangeSums OuterState::change_sums(const at::Tensor& parameters, const at::Tensor& mean) const {
  base::require(has_anchor_, "the outer optimizer has no anchor yet");
  ChangeSums sums{0, 0, 0};
  for (const topology::Range chunk : chunks_of(mean.numel())) {
    const auto wide_of = [&](const at::Tensor& t) { return t.narrow(0, chunk.begin, chunk.size()).to(at::kFloat); };
    const at::Tensor wide = wide_of(parameters), wide_mean = wide_of(mean);
    const float* x = anchor_->flat().const_data_ptr<float>() + chunk.begin;
    const float *p = wide.const_data_ptr<float>(), *m = wide_mean.const_data_ptr<float>();
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      const double mine = static_cast<double>(x[i]) - p[i], all = static_cast<double>(x[i]) - m[i];
      sums.square += mine * mine;
      sums.with_mean += mine * all;
      sums.mean_square += all * all;
    }
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

// The new parameters of some elements of the slice; the moments take the step where it is kept. Elements are worked out
// alone, so that the two passes have the same bits.
at::Tensor OuterState::step(const at::Tensor& mean, double factor, topology::Range chunk, bool keep) const {
  const auto of = [&](const at::Tensor& whole) { return whole.narrow(0, chunk.begin, chunk.size()); };
  std::vector<at::Tensor> moments;
  for (const auto& arena : moments_) moments.push_back(keep ? of(arena->flat()) : of(arena->flat()).clone());
  at::Tensor parameters = of(anchor_->flat()).clone();
  outer_step(options_, parameters, of(mean).to(at::kFloat), moments, factor);
  return parameters;
}

void OuterState::next_parameters(const at::Tensor& mean, double norm, const at::Tensor& parameters) const {
  const c10::NoGradGuard no_grad;
  base::require(has_anchor_, "the outer optimizer has no anchor yet");
  for (const topology::Range chunk : chunks_of(mean.numel())) {
    parameters.narrow(0, chunk.begin, chunk.size()).copy_(step(mean, clip_factor(options_, norm), chunk, false));
  }
}

void OuterState::commit(const at::Tensor& mean, double norm, at::ScalarType dtype) {
  if (!keeps_anchor()) return;
  const c10::NoGradGuard no_grad;
  for (const topology::Range chunk : chunks_of(mean.numel())) {
    const at::Tensor parameters = step(mean, clip_factor(options_, norm), chunk, true);
    anchor_->flat().narrow(0, chunk.begin, chunk.size()).copy_(parameters.to(dtype));
  }
}

}  // namespace fedshard::federation
