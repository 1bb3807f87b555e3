// The owner exchange: the weighted mean of all groups' parameters, out of place.
//
// Each part of the model has an owner among the groups. Every group sends its values of the part to the owner, which
// sums them in group order in fp64, rounds once, and returns the result. That is a reduce-scatter and an all-gather
// made of point-to-point messages, with a ring all-reduce's bytes; but the result has the same bits everywhere,
// whatever the transport and the layout, and nothing is overwritten until the caller spreads it.
//
// Messages and sums are the CPU's, wherever the parameters are: fp64 is slow on most GPUs, and a sum on one kind of
// device has one rounding.
//
// Under HSDP the replicas of a shard share the work as topology::Scheme says. Large models go in buckets, of which few
// are under way at once: the result has the same bits, and the messages take the memory of a few buckets.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <span>
#include <vector>

#include "fedshard/comm/axes.h"
#include "fedshard/federation/bucket_line.h"
#include "fedshard/shard/arena.h"
#include "fedshard/topology/ranges.h"

namespace fedshard::federation {

class Exchange {
 public:
  // What this rank holds of the model and one group owns.
  struct Part {
    int unit = 0;
    topology::Range range;
    std::int64_t offset = 0;            // in the packed slice
    std::map<int, std::int64_t> place;  // in elements, where it lies in its bucket's message to or from a peer, by peer
    std::vector<int> peers;             // index on the federation axis, by group; of the own group: this rank
    int owner = 0;
  };

  // The parts [first, end) of the slice.
  struct Bucket {
    std::size_t first = 0, end = 0;
  };

  // Of what rounds of `plan` exchange and arenas of `map` hold: the parameters, or state that not every element has.
  // `axes` must outlive the exchange. Throws what topology::check_scheme throws.
  Exchange(const topology::Layout& layout, int rank, const plan::ModelPlan& plan, const shard::ArenaMap& map,
           comm::Axes& axes, const topology::ExchangeRules& rules = {});

  // The mean over the groups of this rank's slice of `parameters`, with one weight a group: [slice_numel()] of the
  // parameters' dtype on the CPU, unit after unit. What a group of weight 0 holds, finite or not, has no part in it.
  // Collective over the federation axis. `parameters` is only read, and need hold this rank's slice alone.
  at::Tensor mean_of(const shard::Arena& parameters, std::span<const double> weights, comm::Purpose purpose);
  // The same, written to `mean`.
  void mean_of(const shard::Arena& parameters, std::span<const double> weights, comm::Purpose purpose,
               const at::Tensor& mean);
  // The same of all that the replicas' slices are together, in a room(). Collective over the replica axis too.
  at::Tensor gathered_mean_of(const shard::Arena& parameters, std::span<const double> weights, comm::Purpose purpose);

  // Room for all that the replicas' slices are together, replica after replica: of `dtype`, on the CPU. own(room): this
  // rank's slice in it, a view. gather(room) fills in the other replicas', from the own slice of each. Collective over
  // the replica axis.
  at::Tensor room(at::ScalarType dtype) const;
  at::Tensor own(const at::Tensor& room) const;
  void gather(const at::Tensor& room, comm::Purpose purpose);
  // Into the places of `target`; nobody else is asked.
  void write(const at::Tensor& room, const shard::Arena& target) const;

  // All of it: writes a slice into `target` here and in the other replicas, and theirs into `target`. Collective over
  // the replica axis.
  void spread(const at::Tensor& slice, const shard::Arena& target, comm::Purpose purpose);

  // This rank's slice of `parameters`, packed as mean_of packs it: [slice_numel()] of their dtype on the CPU, a copy.
  at::Tensor slice_of(const shard::Arena& parameters) const;

  // Where its elements lie, for arenas of the same packing: on the CPU, without gaps.
  shard::ArenaMap slice_map(const shard::ArenaMap& map) const;
  // The same for all that the replicas' slices are together: what write() writes.
  shard::ArenaMap shard_map(const shard::ArenaMap& map) const;

  // Squared norm of (this rank's slice of `parameters` - `slice`), or 0 where it is not counted; over a group's ranks
  // these add up to the squared distance of its whole model.
  double square_distance(const shard::Arena& parameters, const at::Tensor& slice) const;

  // Whether sums over a group's ranks count this rank's slice. Where replicas bring the same elements (naive), the
  // first one's count.
  bool is_counted() const { return rules_.scheme != topology::Scheme::naive || axes_.replica->index() == 0; }

  std::int64_t slice_numel() const { return slice_numel_; }
  const std::vector<Part>& parts() const { return parts_; }        // the slice, in order
  const std::vector<Bucket>& buckets() const { return buckets_; }  // of the whole model; where it brings nothing, empty
  const topology::ExchangeRules& rules() const { return rules_; }
  int group() const { return group_; }  // this rank's

 private:
  void add_part(const topology::Layout& layout, const topology::ExchangePart& found, topology::Range range);
  void pack(const shard::Arena& parameters, const Bucket& bucket, const std::vector<comm::Parcel>& to_owners) const;
  // Sums the parts of the bucket that this group owns into `mean`, from this rank's parameters and the other groups'
  // parcels, and leaves them there too.
  void sum_owned(const shard::Arena& parameters, const Bucket& bucket, const std::vector<comm::Parcel>& of_peers,
                 std::span<const double> weights, const at::Tensor& mean) const;
  void take(const Bucket& bucket, const std::vector<comm::Parcel>& returned, const at::Tensor& mean) const;
  bool gathers() const { return replica_slices_.size() > 1; }

  topology::ExchangeRules rules_;
  comm::Axes& axes_;
  int group_;
  std::vector<Part> parts_;
  std::vector<Bucket> buckets_;
  std::vector<BucketSizes> sizes_;  // of their messages
  std::int64_t slice_numel_ = 0;
  std::size_t me_ = 0;                                      // among the replicas below
  std::vector<std::int64_t> replica_numel_;                 // slice sizes, by replica; naive: of this rank alone
  using Slice = std::vector<std::vector<topology::Range>>;  // by unit
  std::vector<Slice> replica_slices_;                       // likewise
};

}  // namespace fedshard::federation
