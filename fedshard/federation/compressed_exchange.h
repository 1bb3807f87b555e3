// The owner exchange of what groups have changed, compressed in both directions with error feedback.
//
// Every group sends the owner of a part its change, encoded; the owner decodes them, sums them in group order in fp64,
// encodes the sum and returns it. So nothing is rounded again from hop to hop, and all groups decode the same bytes.
// What an encoding loses stays with whoever encoded (each rank for its slice, the owner for the sums) and is added to
// what it encodes next.
//
// A surprise: a group's own part is encoded and decoded too, although it does not travel. Otherwise what the groups
// agree on would depend on who owns what.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fedshard/federation/exchange.h"
#include "fedshard/plan/compression.h"
#include "fedshard/shard/state.h"

namespace fedshard::federation {

class CompressedExchange {
 public:
  // slice: where this rank's slice lies, packed (Exchange::slice_map). Registers the residuals "residual_sent" (of this
  // rank's slice) and "residual_returned" (of the parts that its group owns), with `suffix` behind their names.
  // `exchange`, `axes` and `registry` must outlive it. Throws what plan::check_compression throws.
  CompressedExchange(const plan::Compression& compression, const Exchange& exchange, const shard::ArenaMap& slice,
                     comm::Axes& axes, shard::StateRegistry& registry, const std::string& suffix = "");

  // change: this rank's slice of (anchor - parameters), packed, [n] fp32 on the CPU. Returns the groups' weighted mean
  // of it as all groups decode it, packed likewise. What a group of weight 0 sends has no part in it, and takes nothing
  // from its residual. Collective over the federation axis. Residuals change at commit() alone.
  at::Tensor mean_of(const at::Tensor& change, std::span<const double> weights, comm::Purpose purpose);

  // The mean has been applied: what its encodings lost is remembered, in place of what they made up for.
  void commit();

 private:
  using Parcels = std::vector<comm::Parcel>;
  std::span<std::uint8_t> bytes_of(const Parcels& parcels, std::size_t part, int peer) const;
  void encode_mine(const at::Tensor& change, bool counts, const Exchange::Bucket& bucket, const Parcels& to_owners);
  void sum_owned(const at::Tensor& change, std::span<const double> weights, const Exchange::Bucket& bucket,
                 const Parcels& of_peers, const at::Tensor& mean);

  plan::Compression compression_;
  const Exchange& exchange_;
  comm::Axes& axes_;
  shard::ArenaMap slice_, owned_;
  std::unique_ptr<shard::Arena> sent_, returned_;    // the residuals
  at::Tensor next_sent_, next_returned_;             // ... after commit()
  std::vector<std::int64_t> part_bytes_;             // encoded, of each part
  std::vector<std::int64_t> returned_offsets_;       // of each owned part, in elements of returned_
  std::vector<std::map<int, std::int64_t>> places_;  // of each part in its bucket's message to or from a peer, in bytes
  std::vector<BucketSizes> sizes_;                   // of the buckets' messages, in bytes
};

}  // namespace fedshard::federation
