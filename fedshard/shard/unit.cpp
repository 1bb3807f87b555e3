#include "fedshard/shard/unit.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "fedshard/base/error.h"

namespace fedshard::shard {

ShardedUnit::ShardedUnit(const plan::UnitSpec& spec, int index, const ArenaMap& map, UnitDtypes dtypes,
                         comm::Axes& axes, BufferPool& pool)
    : index_(index),
      map_(map),
      axes_(axes),
      flat_(map.shards() * map.shard_numel(index), dtypes.compute, map.device(), pool, index) {
  if (!spec.frozen) gradients_.emplace(map.shards() * map.shard_numel(index), dtypes.reduce, map.device(), pool, index);
  for (int p = 0; p < static_cast<int>(spec.parameters.size()); ++p) {
    const auto& shape = spec.parameters[p].shape;
    parameters_.push_back(flat_.view(spec.offset_of(p), shape));
    if (spec.frozen) continue;
    parameters_.back().set_requires_grad(true);
    if (dtypes.reduce != dtypes.compute) {
      // Autograd otherwise insists on gradients of the parameter's own dtype.
      torch::autograd::impl::materialize_autograd_meta(parameters_.back())
          ->set_grad_dtype(dtypes.reduce, parameters_.back());
    }
    gradient_views_.push_back(gradients_->view(spec.offset_of(p), shape));
  }
}

ShardedUnit::~ShardedUnit() {
  for (const comm::WorkPtr& work : {gathering_, reducing_}) {
    try {
      if (work) work->wait();
    } catch (const std::exception&) {
      // Only the end of the operation matters here; its error has been thrown to whoever waited for it in the step.
    }
  }
}

void ShardedUnit::gather(const Arena& parameters) {
  const c10::NoGradGuard no_grad;
  flat_.acquire();
  const std::int64_t shard_numel = map_.shard_numel(index_);
  flat_.flat().narrow(0, map_.shard() * shard_numel, shard_numel).copy_(parameters.unit(index_));
  gathering_ = axes_.shard->all_gather(flat_.flat(), comm::Purpose::gather);
}

std::span<const at::Tensor> ShardedUnit::gathered() {
  base::require(flat_.present(), "unit {} is used without having been gathered", index_);
  if (gathering_) {
    gathering_->wait();
    gathering_ = nullptr;
  }
  return parameters_;
}

void ShardedUnit::release() {
  gathered();  // a gather still under way writes into the buffer
  flat_.drop();
}

void ShardedUnit::prepare_gradients() {
  if (gradients_->present()) return;
  gradients_->acquire();
  const c10::NoGradGuard no_grad;
  gradients_->flat().zero_();
  for (std::size_t p = 0; p < parameters_.size(); ++p) parameters_[p].mutable_grad() = gradient_views_[p];
}

void ShardedUnit::reduce() {
  base::require(has_gradients() && !reducing_, "unit {} is reduced without gradients or twice", index_);
  const comm::WorkPtr scattered = axes_.shard->reduce_scatter(gradients_->flat(), comm::Purpose::reduce);
  const std::int64_t shard_numel = map_.shard_numel(index_);
  reducing_ = axes_.replica->all_reduce(gradients_->flat().narrow(0, map_.shard() * shard_numel, shard_numel),
                                        comm::Purpose::replica, scattered);
}

void ShardedUnit::finish_reduce(const Arena& gradients, bool add) {
  base::require(reducing_ != nullptr, "unit {} has no reduction to finish", index_);
  reducing_->wait();
  reducing_ = nullptr;
  const c10::NoGradGuard no_grad;
  const std::int64_t shard_numel = map_.shard_numel(index_);
  const at::Tensor sum = gradients_->flat().narrow(0, map_.shard() * shard_numel, shard_numel);
  if (add) {
    gradients.unit(index_).add_(sum);
  } else {
    gradients.unit(index_).copy_(sum);
  }
  for (at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  gradients_->drop();
}

}  // namespace fedshard::shard
