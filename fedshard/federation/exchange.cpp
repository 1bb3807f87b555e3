#include "fedshard/federation/exchange.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>

#include "fedshard/base/error.h"

namespace fedshard::federation {
namespace {

int index_of(const comm::Members& members, int rank) {
  const auto place = std::find(members.ranks.begin(), members.ranks.end(), rank);
  base::require(place != members.ranks.end(), "rank {} is not on the {}", rank, members.name);
  return static_cast<int>(place - members.ranks.begin());
}

void copy_elements(float* to, const float* from, std::int64_t count) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
}

const at::Tensor& buffer_of(const std::vector<comm::Parcel>& parcels, int peer) {
  const auto found =
      std::find_if(parcels.begin(), parcels.end(), [&](const comm::Parcel& p) { return p.peer == peer; });
  base::require(found != parcels.end(), "no parcel for peer {}", peer);
  return found->buffer;
}

}  // namespace

Exchange::Exchange(const topology::Layout& layout, int rank, const plan::ModelPlan& plan, const shard::ArenaMap& map,
                   comm::Axes& axes)
    : axes_(axes), group_(layout.group_of(rank)) {
  std::vector<std::int64_t> unit_numel;
  // Frozen units are the same in all groups: as empty ones they have no part in a round.
  for (const plan::UnitSpec& unit : plan.units) unit_numel.push_back(unit.frozen ? 0 : unit.numel());
  for (const topology::ExchangePart& found : topology::exchange_parts(layout, unit_numel, rank)) {
    Part part{found.unit, found.range, slice_numel_, {}, {}, found.owner};
    for (int group = 0; group < layout.groups(); ++group) {
      const int peer = index_of(axes.federation->members(), found.holders[group]);
      part.peers.push_back(peer);
      if (group == group_ || (found.owner != group_ && found.owner != group)) continue;
      auto& size = found.owner == group_ ? from_peer_[peer] : to_owner_[peer];
      part.place[peer] = size;
      size += found.range.size();
    }
    slice_numel_ += found.range.size();
    parts_.push_back(std::move(part));
  }
  const topology::GroupShape& shape = layout.group(group_);
  for (int replica = 0; replica < shape.replicas; ++replica) {
    replica_numel_.push_back(0);
    replica_slices_.emplace_back();
    for (const std::int64_t numel : unit_numel) {
      replica_slices_.back().push_back(topology::slice_range(numel, shape, replica, map.shard()));
      replica_numel_.back() += replica_slices_.back().back().size();
    }
  }
}

std::vector<comm::Parcel> Exchange::parcels(const std::map<int, std::int64_t>& sizes) const {
  std::vector<comm::Parcel> result;
  for (const auto& [peer, size] : sizes) result.push_back({peer, at::empty({size}, at::kFloat)});
  return result;
}

std::vector<comm::Parcel> Exchange::pack(const shard::Arena& parameters) const {
  std::vector<comm::Parcel> result = parcels(to_owner_);
  for (const Part& part : parts_) {
    if (part.owner == group_) continue;
    const int peer = part.peers[part.owner];
    copy_elements(buffer_of(result, peer).mutable_data_ptr<float>() + part.place.at(peer),
                  parameters.slice(part.unit, part.range).cpu().const_data_ptr<float>(), part.range.size());
  }
  return result;
}

at::Tensor Exchange::mean_of(const shard::Arena& parameters, std::span<const double> weights, comm::Purpose purpose) {
  const c10::NoGradGuard no_grad;
  const std::vector<comm::Parcel> mine = pack(parameters), theirs = parcels(from_peer_);
  axes_.federation->exchange(mine, theirs, purpose)->wait();
  const at::Tensor mean = at::empty({slice_numel_}, at::kFloat);
  const std::vector<comm::Parcel> results = parcels(from_peer_), returned = parcels(to_owner_);
  for (const Part& part : parts_) {
    if (part.owner != group_) continue;
    const at::Tensor mine_on_host = parameters.slice(part.unit, part.range).cpu();
    std::vector<const float*> values;
    for (int group = 0; group < static_cast<int>(part.peers.size()); ++group) {
      const int peer = part.peers[group];
      values.push_back(group == group_ ? mine_on_host.const_data_ptr<float>()
                                       : buffer_of(theirs, peer).const_data_ptr<float>() + part.place.at(peer));
    }
    float* out = mean.mutable_data_ptr<float>() + part.offset;
    for (std::int64_t i = 0; i < part.range.size(); ++i) {
      double sum = weights[0] * values[0][i];  // not 0 + ...: that would turn groups' common -0 into +0
      for (std::size_t group = 1; group < values.size(); ++group) sum += weights[group] * values[group][i];
      out[i] = static_cast<float>(sum);
    }
    for (const auto& [peer, place] : part.place) {
      copy_elements(buffer_of(results, peer).mutable_data_ptr<float>() + place, out, part.range.size());
    }
  }
  axes_.federation->exchange(results, returned, purpose)->wait();
  for (const Part& part : parts_) {
    if (part.owner == group_) continue;
    const int peer = part.peers[part.owner];
    copy_elements(mean.mutable_data_ptr<float>() + part.offset,
                  buffer_of(returned, peer).const_data_ptr<float>() + part.place.at(peer), part.range.size());
  }
  return mean;
}

void Exchange::spread(const at::Tensor& slice, const shard::Arena& target, comm::Purpose purpose) {
  const c10::NoGradGuard no_grad;
  const int replica = axes_.replica->index();
  std::int64_t total = 0, mine = 0;
  for (int r = 0; r < static_cast<int>(replica_numel_.size()); ++r) {
    if (r == replica) mine = total;
    total += replica_numel_[r];
  }
  at::Tensor all = slice;
  if (axes_.replica->size() > 1) {
    all = at::empty({total}, at::kFloat);
    all.narrow(0, mine, slice_numel_).copy_(slice);
    axes_.replica->all_gather(all, replica_numel_, purpose)->wait();
  }
  std::int64_t offset = 0;
  for (const auto& slices : replica_slices_) {
    for (int u = 0; u < static_cast<int>(slices.size()); ++u) {
      if (slices[u].size() == 0) continue;
      target.slice(u, slices[u]).copy_(all.narrow(0, offset, slices[u].size()));
      offset += slices[u].size();
    }
  }
}

double Exchange::square_distance(const shard::Arena& parameters, const at::Tensor& slice) const {
  double square = 0;
  const float* mean = slice.const_data_ptr<float>();
  for (const Part& part : parts_) {
    const at::Tensor on_host = parameters.slice(part.unit, part.range).cpu();
    const float* values = on_host.const_data_ptr<float>();
    for (std::int64_t i = 0; i < part.range.size(); ++i) {
      const double difference = static_cast<double>(values[i]) - mean[part.offset + i];
      square += difference * difference;
    }
  }
  return square;
}

}  // namespace fedshard::federation
