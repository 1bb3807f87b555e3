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
// Under HSDP each replica exchanges only its slice of the shard ("split"): every network card carries 1/R.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <span>
#include <vector>

#include "fedshard/comm/axes.h"
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
    std::map<int, std::int64_t> place;  // in elements, where it lies in the message to or from a peer, by peer
    std::vector<int> peers;             // index on the federation axis, by group; of the own group: this rank
    int owner = 0;
  };

  // Of what rounds of `plan` exchange. `map` and `axes` must outlive the exchange.
  Exchange(const topology::Layout& layout, int rank, const plan::ModelPlan& plan, const shard::ArenaMap& map,
           comm::Axes& axes);

  // The mean over the groups of this rank's slice of `parameters`, with one weight a group: [slice_numel()] of the
  // parameters' dtype on the CPU, unit after unit. What a group of weight 0 holds, finite or not, has no part in it.
  // Collective over the federation axis. `parameters` is only read, and need hold this rank's slice alone.
  at::Tensor mean_of(const shard::Arena& parameters, std::span<const double> weights, comm::Purpose purpose);

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

  // Squared norm of (this rank's slice of `parameters` - `slice`); over a group's ranks these add up to the squared
  // distance of its whole model.
  double square_distance(const shard::Arena& parameters, const at::Tensor& slice) const;

  std::int64_t slice_numel() const { return slice_numel_; }
  const std::vector<Part>& parts() const { return parts_; }  // the slice, in order
  int group() const { return group_; }                       // this rank's

 private:
  std::vector<comm::Parcel> pack(const shard::Arena& parameters) const;
  // Sums the parts that this group owns into `mean`, from this rank's parameters and the other groups' parcels.
  void sum_owned(const shard::Arena& parameters, const std::vector<comm::Parcel>& theirs,
                 std::span<const double> weights, const at::Tensor& mean) const;

  comm::Axes& axes_;
  int group_;
  std::vector<Part> parts_;
  std::map<int, std::int64_t> to_owner_;   // elements of mine that a peer owns
  std::map<int, std::int64_t> from_peer_;  // elements of a peer's that I own
  std::int64_t slice_numel_ = 0;
  std::vector<std::int64_t> replica_numel_;                   // slice sizes, by replica
  std::vector<std::vector<topology::Range>> replica_slices_;  // by replica and unit
};

}  // namespace fedshard::federation
