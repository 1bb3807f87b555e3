#include "fedshard/federation/fragment.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/federation/chunks.h"
#include "fedshard/shard/digest.h"

namespace fedshard::federation {
namespace {

double square_norm_of(const at::Tensor& values) {
  double square = 0;
  for (const topology::Range chunk : chunks_of(values.numel())) {
    const at::Tensor wide = values.narrow(0, chunk.begin, chunk.size()).to(at::kFloat);
    const float* v = wide.const_data_ptr<float>();
    for (std::int64_t i = 0; i < wide.numel(); ++i) square += static_cast<double>(v[i]) * v[i];
  }
  return square;
}

}  // namespace

Fragment::Fragment(const topology::Layout& layout, int rank, const topology::ExchangeRules& rules,
                   const OuterOptions& outer, const plan::Compression& compression, bool keeps_anchor,
                   const shard::Engine& engine, comm::Axes& axes, plan::ModelPlan plan, const std::string& suffix,
                   shard::StateRegistry& registry)
    : options_(outer),
      axes_(axes),
      plan_(std::move(plan)),
      exchange_(layout, rank, plan_, engine.map(), axes, rules),
      slice_map_(exchange_.slice_map(engine.map())),
      shard_map_(exchange_.shard_map(engine.map())),
      dtype_(engine.parameters().dtype()),
      outer_(outer, keeps_anchor || compression.kind != plan::Compression::Kind::none, slice_map_, registry, suffix) {
  if (compression.kind != plan::Compression::Kind::none) {
    compressed_.emplace(compression, exchange_, slice_map_, axes, registry, suffix);
  }
}

void Fragment::set_anchor(const shard::Arena& parameters) {
  if (keeps_anchor()) outer_.set_anchor(exchange_.slice_of(parameters));
}

std::unique_ptr<shard::Arena> Fragment::copy_of_slice(const shard::Arena& parameters) const {
  auto copy = std::make_unique<shard::Arena>(slice_map_, dtype_);
  for (const shard::ArenaPiece& piece : slice_map_.pieces()) {
    copy->slice(piece.unit, piece.range).copy_(parameters.slice(piece.unit, piece.range));
  }
  return copy;
}

std::vector<Contribution> Fragment::contributions(const shard::Arena& parameters, std::uint64_t digest,
                                                  bool is_finite) {
  const at::Tensor slice = exchange_.slice_of(parameters);
  std::array<double, 2> sums{};
  if (exchange_.is_counted()) sums[0] = keeps_anchor() ? outer_.square_distance(slice) : square_norm_of(slice);
  if (!is_finite) sums[0] = std::numeric_limits<double>::quiet_NaN();
  if (axes_.replica->size() > 1) {
    const auto digests = axes_.replica->collect(shard::halves_of(digest));
    for (const auto& of_replica : digests) sums[1] += of_replica != digests[0];
  }
  axes_.group->sum(sums);
  std::vector<Contribution> all;
  for (const auto& of_group : comm::collect_by_group(axes_, sums)) all.push_back({of_group[0], of_group[1] > 0});
  return all;
}

at::Tensor Fragment::mean_of(const shard::Arena& parameters, std::span<const double> weights) {
  at::Tensor mean;
  if (!keeps_anchor()) {
    // The mean is the new parameters, so it comes about where these are gathered.
    room_ = exchange_.room(dtype_);
    mean = exchange_.own(room_);
    exchange_.mean_of(parameters, weights, comm::Purpose::aggregate, mean);
  } else if (compressed_) {
    const at::Tensor change = outer_.change_of(exchange_.slice_of(parameters));
    mean = outer_.changed_by(compressed_->mean_of(change, weights, comm::Purpose::aggregate));
  } else {
    mean = exchange_.mean_of(parameters, weights, comm::Purpose::aggregate);
  }
  norm_ = pseudo_gradient_norm(mean);
  return mean;
}

ChangeSums Fragment::change_sums(const shard::Arena& parameters, const at::Tensor& mean) const {
  if (!keeps_anchor()) return {};
  return exchange_.is_counted() ? outer_.change_sums(exchange_.slice_of(parameters), mean) : ChangeSums{0, 0, 0};
}

at::Tensor Fragment::next_parameters(const at::Tensor& mean, std::int64_t round) {
  at::Tensor all = std::exchange(room_, {});
  if (keeps_anchor()) {
    all = exchange_.room(dtype_);
    const at::Tensor mine = exchange_.own(all);
    outer_.next_parameters(mean, norm_, mine);
    // What groups bring is sound, so only the step itself can have led there.
    if (!all_finite(mine)) {
      base::fail<base::RunError>(
          "round {}: the outer step leads to parameters that are not finite: lower [federation] outer_lr or set "
          "outer_max_norm",
          round);
    }
  }
  exchange_.gather(all, comm::Purpose::aggregate);
  return all;
}

void Fragment::commit(const at::Tensor& mean) {
  if (compressed_) compressed_->commit();
  outer_.commit(mean, norm_, dtype_);
}

// The same on every rank of the world, to the bit: groups of other shapes would add up in another order.
double Fragment::pseudo_gradient_norm(const at::Tensor& mean) {
  if (options_.max_norm == 0) return 0;
  std::array<double, 1> square{exchange_.is_counted() ? outer_.square_distance(mean) : 0};
  axes_.group->sum(square);
  return std::sqrt(comm::collect_by_group(axes_, square)[0][0]);
}

}  // namespace fedshard::federation
