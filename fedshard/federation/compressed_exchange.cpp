#include "fedshard/federation/compressed_exchange.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/federation/compress.h"
#include "fedshard/federation/parcels.h"

namespace fedshard::federation {
namespace {

std::span<float> floats_of(const at::Tensor& tensor, std::int64_t offset, std::int64_t count) {
  return {tensor.mutable_data_ptr<float>() + offset, static_cast<std::size_t>(count)};
}

// Where the parts that this rank's group owns lie, packed.
shard::ArenaMap owned_map(const Exchange& exchange, const shard::ArenaMap& slice) {
  std::vector<std::vector<topology::Range>> kept(static_cast<std::size_t>(slice.units()));
  for (const Exchange::Part& part : exchange.parts()) {
    if (part.owner == exchange.group()) kept[static_cast<std::size_t>(part.unit)].push_back(part.range);
  }
  return {slice, kept};
}

}  // namespace

CompressedExchange::CompressedExchange(const plan::Compression& compression, const Exchange& exchange,
                                       const shard::ArenaMap& slice, comm::Axes& axes, shard::StateRegistry& registry,
                                       const std::string& suffix)
    : compression_((plan::check_compression(compression), compression)),
      exchange_(exchange),
      axes_(axes),
      slice_(slice),
      owned_(owned_map(exchange, slice)),
      sent_(std::make_unique<shard::Arena>(slice_)),
      returned_(std::make_unique<shard::Arena>(owned_)) {
  registry.add("residual_sent" + suffix, shard::Role::residuals, shard::Scope::group, *sent_);
  registry.add("residual_returned" + suffix, shard::Role::residuals, shard::Scope::rank, *returned_);
  std::int64_t owned = 0;
  for (const Exchange::Bucket& bucket : exchange.buckets()) {
    BucketSizes& sizes = sizes_.emplace_back();
    for (std::size_t p = bucket.first; p < bucket.end; ++p) {
      const Exchange::Part& part = exchange.parts()[p];
      const std::int64_t bytes = plan::encoded_bytes(compression_, part.range.size());
      part_bytes_.push_back(bytes);
      places_.emplace_back();
      returned_offsets_.push_back(owned);
      const bool mine = part.owner == exchange.group();
      if (mine) owned += part.range.size();
      for (const auto& [peer, place] : part.place) {
        auto& size = mine ? sizes.from_peer[peer] : sizes.to_owner[peer];
        places_.back()[peer] = size;
        size += bytes;
      }
    }
  }
}

std::span<std::uint8_t> CompressedExchange::bytes_of(const Parcels& parcels, std::size_t part, int peer) const {
  return {buffer_of(parcels, peer).mutable_data_ptr<std::uint8_t>() + places_[part].at(peer),
          static_cast<std::size_t>(part_bytes_[part])};
}

// Fills the parcels for the owners. `counts`: whether the group weighs something.
void CompressedExchange::encode_mine(const at::Tensor& change, bool counts, const Exchange::Bucket& bucket,
                                     const Parcels& to_owners) {
  for (std::size_t p = bucket.first; p < bucket.end; ++p) {
    const Exchange::Part& part = exchange_.parts()[p];
    if (part.owner == exchange_.group()) continue;
    const std::int64_t size = part.range.size();
    const std::span<std::uint8_t> bytes = bytes_of(to_owners, p, part.peers[static_cast<std::size_t>(part.owner)]);
    const std::span<const float> values = floats_of(change, part.offset, size);
    if (counts) {
      encode_with_feedback(compression_, values, floats_of(sent_->flat(), part.offset, size), bytes,
                           floats_of(next_sent_, part.offset, size));
    } else {
      encode(compression_, values, bytes);
    }
  }
}

// Sums the parts that this rank's group owns, its own values among them, and leaves the encoded sums in the parcels.
void CompressedExchange::sum_owned(const at::Tensor& change, std::span<const double> weights,
                                   const Exchange::Bucket& bucket, const Parcels& of_peers, const at::Tensor& mean) {
  std::vector<double> sums;
  std::vector<float> values;
  std::vector<std::uint8_t> encoded;
  for (std::size_t p = bucket.first; p < bucket.end; ++p) {
    const Exchange::Part& part = exchange_.parts()[p];
    if (part.owner != exchange_.group()) continue;
    const std::int64_t size = part.range.size();
    sums.assign(static_cast<std::size_t>(size), 0.0);
    values.resize(sums.size());
    encoded.resize(static_cast<std::size_t>(part_bytes_[p]));
    for (std::size_t group = 0; group < part.peers.size(); ++group) {
      if (weights[group] == 0) continue;  // 0 times what is not finite is not 0
      const bool is_own = static_cast<int>(group) == exchange_.group();
      if (is_own) {
        encode_with_feedback(compression_, floats_of(change, part.offset, size),
                             floats_of(sent_->flat(), part.offset, size), encoded,
                             floats_of(next_sent_, part.offset, size));
      }
      decode(compression_,
             is_own ? std::span<const std::uint8_t>(encoded)
                    : std::span<const std::uint8_t>(bytes_of(of_peers, p, part.peers[group])),
             values);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += weights[group] * static_cast<double>(values[i]);
    }
    for (std::size_t i = 0; i < sums.size(); ++i) values[i] = static_cast<float>(sums[i]);
    encode_with_feedback(compression_, values, floats_of(returned_->flat(), returned_offsets_[p], size), encoded,
                         floats_of(next_returned_, returned_offsets_[p], size));
    decode(compression_, encoded, floats_of(mean, part.offset, size));
    for (const auto& [peer, place] : places_[p]) {
      std::copy(encoded.begin(), encoded.end(), bytes_of(of_peers, p, peer).begin());
    }
  }
}

at::Tensor CompressedExchange::mean_of(const at::Tensor& change, std::span<const double> weights,
                                       comm::Purpose purpose) {
  base::require(change.scalar_type() == at::kFloat && change.numel() == exchange_.slice_numel(),
                "{} elements to be exchanged, and not {} in fp32", change.numel(), exchange_.slice_numel());
  const c10::NoGradGuard no_grad;
  const at::Tensor mean = at::empty_like(change);
  next_sent_ = sent_->flat().clone();
  next_returned_ = at::empty_like(returned_->flat());
  const bool counts = weights[static_cast<std::size_t>(exchange_.group())] != 0;
  const auto take = [&](std::size_t b, const Parcels& returned) {
    for (std::size_t p = exchange_.buckets()[b].first; p < exchange_.buckets()[b].end; ++p) {
      const Exchange::Part& part = exchange_.parts()[p];
      if (part.owner == exchange_.group()) continue;
      decode(compression_, bytes_of(returned, p, part.peers[static_cast<std::size_t>(part.owner)]),
             floats_of(mean, part.offset, part.range.size()));
    }
  };
  exchange_buckets(
      *axes_.federation, sizes_, at::kByte, exchange_.rules().concurrency, purpose,
      {.pack = [&](std::size_t b,
                   const Parcels& to_owners) { encode_mine(change, counts, exchange_.buckets()[b], to_owners); },
       .sum = [&](std::size_t b,
                  const Parcels& of_peers) { sum_owned(change, weights, exchange_.buckets()[b], of_peers, mean); },
       .take = take});
  return mean;
}

void CompressedExchange::commit() {
  base::require(next_sent_.defined() && next_returned_.defined(), "nothing was exchanged that could be committed");
  sent_->flat().copy_(next_sent_);
  returned_->flat().copy_(next_returned_);
  next_sent_.reset();
  next_returned_.reset();
}

}  // namespace fedshard::federation
