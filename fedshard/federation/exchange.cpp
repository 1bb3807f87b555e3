#include "fedshard/federation/exchange.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "fedshard/base/error.h"
#include "fedshard/federation/parcels.h"

namespace fedshard::federation {
namespace {

int index_of(const comm::Members& members, int rank) {
  const auto place = std::find(members.ranks.begin(), members.ranks.end(), rank);
  base::require(place != members.ranks.end(), "rank {} is not on the {}", rank, members.name);
  return static_cast<int>(place - members.ranks.begin());
}

void round_to(double value, float& out) { out = static_cast<float>(value); }

// Through fp32, but rounded once: what fp32 can't hold exactly is cut off and marked by an odd last bit ("round to
// odd", Boldo and Melquiond, IEEE TC 57(4), 2008), so that the second rounding can't take it for a tie.
void round_to(double value, c10::BFloat16& out) {
  auto narrow = static_cast<float>(value);
  if (static_cast<double>(narrow) != value && !std::isnan(narrow)) {
    auto bits = std::bit_cast<std::uint32_t>(narrow);
    if (std::abs(static_cast<double>(narrow)) > std::abs(value)) --bits;
    narrow = std::bit_cast<float>(bits | 1u);
  }
  out = narrow;
}

// out[i] = the sum over the groups of weights[group] * values[group][i], in that order.
template <class T>
void weigh(std::span<const at::Tensor> values, std::span<const double> weights, const at::Tensor& out) {
  // Of groups that weigh something: 0 times what is not finite is not 0.
  std::vector<const T*> in;
  std::vector<double> factors;
  for (std::size_t group = 0; group < values.size(); ++group) {
    if (weights[group] == 0) continue;
    in.push_back(values[group].const_data_ptr<T>());
    factors.push_back(weights[group]);
  }
  base::require(!in.empty(), "no group weighs anything");
  T* const result = out.mutable_data_ptr<T>();
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    double sum = factors[0] * static_cast<double>(in[0][i]);  // not 0 + ...: that would turn a common -0 into +0
    for (std::size_t group = 1; group < in.size(); ++group) sum += factors[group] * static_cast<double>(in[group][i]);
    round_to(sum, result[i]);
  }
}

// What arenas of `map` hold of the range.
std::vector<topology::Range> held_of(const shard::ArenaMap& map, int unit, topology::Range range) {
  std::vector<topology::Range> held;
  for (const shard::ArenaPiece& piece : map.pieces()) {
    if (piece.unit != unit) continue;
    const topology::Range both{std::max(piece.range.begin, range.begin), std::min(piece.range.end, range.end)};
    if (both.size() > 0) held.push_back(both);
  }
  return held;
}

}  // namespace

Exchange::Exchange(const topology::Layout& layout, int rank, const plan::ModelPlan& plan, const shard::ArenaMap& map,
                   comm::Axes& axes, const topology::ExchangeRules& rules)
    : rules_((topology::check_scheme(rules.scheme, layout), rules)), axes_(axes), group_(layout.group_of(rank)) {
  const std::vector<std::int64_t> unit_numel = plan.exchanged_numel_by_unit();
  const auto buckets = static_cast<std::size_t>(topology::bucket_count(rules.buckets, unit_numel));
  buckets_.resize(buckets);
  sizes_.resize(buckets);
  for (const topology::ExchangePart& found : topology::exchange_parts(layout, unit_numel, rank, rules)) {
    for (const topology::Range& held : held_of(map, found.unit, found.range)) add_part(layout, found, held);
  }
  const topology::GroupShape& shape = layout.group(group_);
  const int mine = layout.at(rank).replica;
  for (int replica = 0; replica < shape.replicas; ++replica) {
    if (rules.scheme == topology::Scheme::naive && replica != mine) continue;
    if (replica == mine) me_ = replica_slices_.size();
    replica_numel_.push_back(0);
    replica_slices_.emplace_back();
    for (int u = 0; u < std::ssize(unit_numel); ++u) {
      const auto slice = topology::slice_range(unit_numel[u], shape, replica, map.shard(), rules.scheme);
      replica_slices_.back().push_back(held_of(map, u, slice));
      for (const topology::Range& held : replica_slices_.back().back()) replica_numel_.back() += held.size();
    }
  }
}

void Exchange::add_part(const topology::Layout& layout, const topology::ExchangePart& found, topology::Range range) {
  Bucket& bucket = buckets_[static_cast<std::size_t>(found.bucket)];
  BucketSizes& sizes = sizes_[static_cast<std::size_t>(found.bucket)];
  if (bucket.end == 0) bucket.first = parts_.size();
  bucket.end = parts_.size() + 1;
  Part part{found.unit, range, slice_numel_, {}, {}, found.owner};
  for (int group = 0; group < layout.groups(); ++group) {
    const int peer = index_of(axes_.federation->members(), found.holders[group]);
    part.peers.push_back(peer);
    if (group == group_ || (found.owner != group_ && found.owner != group)) continue;
    auto& size = found.owner == group_ ? sizes.from_peer[peer] : sizes.to_owner[peer];
    part.place[peer] = size;
    size += range.size();
  }
  slice_numel_ += range.size();
  parts_.push_back(std::move(part));
}

void Exchange::pack(const shard::Arena& parameters, const Bucket& bucket,
                    const std::vector<comm::Parcel>& to_owners) const {
  for (std::size_t p = bucket.first; p < bucket.end; ++p) {
    const Part& part = parts_[p];
    if (part.owner == group_) continue;
    const int peer = part.peers[part.owner];
    buffer_of(to_owners, peer)
        .narrow(0, part.place.at(peer), part.range.size())
        .copy_(parameters.slice(part.unit, part.range));
  }
}

void Exchange::sum_owned(const shard::Arena& parameters, const Bucket& bucket,
                         const std::vector<comm::Parcel>& of_peers, std::span<const double> weights,
                         const at::Tensor& mean) const {
  for (std::size_t p = bucket.first; p < bucket.end; ++p) {
    const Part& part = parts_[p];
    if (part.owner != group_) continue;
    const auto in_parcel = [&](int peer) {
      return buffer_of(of_peers, peer).narrow(0, part.place.at(peer), part.range.size());
    };
    std::vector<at::Tensor> values;
    for (int group = 0; group < static_cast<int>(part.peers.size()); ++group) {
      values.push_back(group == group_ ? parameters.slice(part.unit, part.range).cpu() : in_parcel(part.peers[group]));
    }
    const at::Tensor out = mean.narrow(0, part.offset, part.range.size());
    if (mean.scalar_type() == at::kFloat) {
      weigh<float>(values, weights, out);
    } else {
      weigh<c10::BFloat16>(values, weights, out);
    }
    for (const auto& [peer, place] : part.place) in_parcel(peer).copy_(out);
  }
}

void Exchange::take(const Bucket& bucket, const std::vector<comm::Parcel>& returned, const at::Tensor& mean) const {
  for (std::size_t p = bucket.first; p < bucket.end; ++p) {
    const Part& part = parts_[p];
    if (part.owner == group_) continue;
    const int peer = part.peers[part.owner];
    mean.narrow(0, part.offset, part.range.size())
        .copy_(buffer_of(returned, peer).narrow(0, part.place.at(peer), part.range.size()));
  }
}

void Exchange::mean_of(const shard::Arena& parameters, std::span<const double> weights, comm::Purpose purpose,
                       const at::Tensor& mean) {
  const c10::NoGradGuard no_grad;
  using Parcels = std::vector<comm::Parcel>;
  exchange_buckets(
      *axes_.federation, sizes_, parameters.dtype(), rules_.concurrency, purpose,
      {.pack = [&](std::size_t b, const Parcels& to_owners) { pack(parameters, buckets_[b], to_owners); },
       .sum = [&](std::size_t b,
                  const Parcels& of_peers) { sum_owned(parameters, buckets_[b], of_peers, weights, mean); },
       .take = [&](std::size_t b, const Parcels& returned) { take(buckets_[b], returned, mean); }});
}

at::Tensor Exchange::mean_of(const shard::Arena& parameters, std::span<const double> weights, comm::Purpose purpose) {
  const at::Tensor mean = at::empty({slice_numel_}, parameters.dtype());
  mean_of(parameters, weights, purpose, mean);
  return mean;
}

at::Tensor Exchange::gathered_mean_of(const shard::Arena& parameters, std::span<const double> weights,
                                      comm::Purpose purpose) {
  const at::Tensor all = room(parameters.dtype());
  mean_of(parameters, weights, purpose, own(all));
  gather(all, purpose);
  return all;
}

at::Tensor Exchange::room(at::ScalarType dtype) const {
  return at::empty({std::accumulate(replica_numel_.begin(), replica_numel_.end(), std::int64_t{0})}, dtype);
}

at::Tensor Exchange::own(const at::Tensor& room) const {
  const auto mine = replica_numel_.begin() + static_cast<std::ptrdiff_t>(me_);
  return room.narrow(0, std::accumulate(replica_numel_.begin(), mine, std::int64_t{0}), slice_numel_);
}

void Exchange::gather(const at::Tensor& room, comm::Purpose purpose) {
  if (!gathers()) return;
  if (rules_.scheme != topology::Scheme::leader) {
    axes_.replica->all_gather(room, replica_numel_, purpose)->wait();
    return;
  }
  // One replica has all of it. Cut up, so that the next in the chain sends on what it has while more comes.
  std::vector<comm::WorkPtr> under_way;
  for (std::int64_t begin = 0; begin < room.numel(); begin += topology::kLeaderLinkNumel) {
    std::vector<std::int64_t> counts = replica_numel_;
    for (std::int64_t& count : counts)
      count = std::min(count, std::min(topology::kLeaderLinkNumel, room.numel() - begin));
    const at::Tensor link = room.narrow(0, begin, *std::max_element(counts.begin(), counts.end()));
    under_way.push_back(axes_.replica->all_gather(link, counts, purpose));
  }
  for (const comm::WorkPtr& work : under_way) work->wait();
}

void Exchange::write(const at::Tensor& room, const shard::Arena& target) const {
  const c10::NoGradGuard no_grad;
  std::int64_t offset = 0;
  for (const Slice& slice : replica_slices_) {
    for (int u = 0; u < std::ssize(slice); ++u) {
      for (const topology::Range& range : slice[u]) {
        target.slice(u, range).copy_(room.narrow(0, offset, range.size()));
        offset += range.size();
      }
    }
  }
}

void Exchange::spread(const at::Tensor& slice, const shard::Arena& target, comm::Purpose purpose) {
  const at::Tensor all = gathers() ? room(slice.scalar_type()) : slice;
  if (gathers()) own(all).copy_(slice);
  gather(all, purpose);
  write(all, target);
}

at::Tensor Exchange::slice_of(const shard::Arena& parameters) const {
  const c10::NoGradGuard no_grad;
  const at::Tensor slice = at::empty({slice_numel_}, parameters.dtype());
  for (const Part& part : parts_) {
    slice.narrow(0, part.offset, part.range.size()).copy_(parameters.slice(part.unit, part.range));
  }
  return slice;
}

shard::ArenaMap Exchange::slice_map(const shard::ArenaMap& map) const {
  return {map.on(at::kCPU), replica_slices_[me_]};
}

shard::ArenaMap Exchange::shard_map(const shard::ArenaMap& map) const {
  Slice all(static_cast<std::size_t>(map.units()));
  for (const Slice& slice : replica_slices_) {
    for (std::size_t u = 0; u < slice.size(); ++u) {
      for (const topology::Range& range : slice[u]) {
        if (!all[u].empty() && all[u].back().end == range.begin) {
          all[u].back().end = range.end;
        } else {
          all[u].push_back(range);
        }
      }
    }
  }
  return {map.on(at::kCPU), all};
}

double Exchange::square_distance(const shard::Arena& parameters, const at::Tensor& slice) const {
  double square = 0;
  if (!is_counted()) return square;
  for (const Part& part : parts_) {
    const at::Tensor on_host = parameters.slice(part.unit, part.range).to(at::kCPU, at::kFloat);
    const at::Tensor mean = slice.narrow(0, part.offset, part.range.size()).to(at::kFloat);
    const float* values = on_host.const_data_ptr<float>();
    const float* means = mean.const_data_ptr<float>();
    for (std::int64_t i = 0; i < part.range.size(); ++i) {
      const double difference = static_cast<double>(values[i]) - means[i];
      square += difference * difference;
    }
  }
  return square;
}

}  // namespace fedshard::federation
