// Collectives along one axis of the layout, asynchronous.
//
// The contract: a call returns at once with a Work; operations of one communicator run one after another in the order
// of the calls, which must be the same on every member. A buffer passed in may be neither read nor written until its
// Work is done. Everything is in place: an all-gather's own chunk already lies where it belongs, a reduce-scatter
// leaves its result in this member's chunk and garbage in the others. A communicator of one member does nothing and
// sends nothing.
//
// Sums are plain sums: scale is the caller's, because a backend's "average" has been wrong in too many places.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fedshard/comm/traffic.h"
#include "fedshard/comm/transport.h"

namespace fedshard::comm {

class Work {
 public:
  virtual ~Work() = default;
  // Returns when the operation is done; throws what ended it. May be called repeatedly and from any thread. For tensors
  // on a GPU it returns at once, and the current stream of the calling thread waits instead (nccl.h).
  virtual void wait() = 0;
};
using WorkPtr = std::shared_ptr<Work>;

// What goes to or comes from one member in an exchange.
struct Parcel {
  int peer = 0;       // index into Members::ranks
  at::Tensor buffer;  // contiguous
};

// Told, on the communicator's worker thread, of each operation that begins: "reduce-scatter (reduce) on the shard axis
// of group 0, replica 1". Lets a rank say where it was when a peer did not come.
using Watcher = std::function<void(const std::string& what)>;

class Communicator {
 public:
  explicit Communicator(Members members) : members_(std::move(members)) {}
  virtual ~Communicator() = default;
  const Members& members() const { return members_; }
  int size() const { return members_.size(); }
  int index() const { return members_.index; }

  // buffer: contiguous, 1-dim, n equal chunks; chunk i is member i's. Sends (n-1)/n of it.
  virtual WorkPtr all_gather(const at::Tensor& buffer, Purpose purpose, WorkPtr after = nullptr) = 0;
  // The same with chunks of counts[i] elements, some of which may be 0.
  virtual WorkPtr all_gather(const at::Tensor& buffer, std::vector<std::int64_t> counts, Purpose purpose,
                             WorkPtr after = nullptr) = 0;
  // buffer: fp32 or bf16, contiguous, n equal chunks. Afterwards chunk index() holds the sum over the members.
  virtual WorkPtr reduce_scatter(const at::Tensor& buffer, Purpose purpose, WorkPtr after = nullptr) = 0;
  // buffer: fp32 or bf16, contiguous, any length. The same bits on every member. Sends 2(n-1)/n of it on average.
  virtual WorkPtr all_reduce(const at::Tensor& buffer, Purpose purpose, WorkPtr after = nullptr) = 0;
  // Point-to-point: at most one parcel to and from each peer; both sides agree on the sizes.
  virtual WorkPtr exchange(std::vector<Parcel> sends, std::vector<Parcel> receives, Purpose purpose,
                           WorkPtr after = nullptr) = 0;

  // A few numbers of every member, by member. Blocks. Counted as control.
  std::vector<std::vector<double>> collect(std::span<const double> values);
  // Their sum in member order, the same bits everywhere.
  void sum(std::span<double> values);

 private:
  Members members_;
};

// Makes the communicator of these members. Every member must call it for the same communicators in the same order.
using Connect = std::function<std::unique_ptr<Communicator>(Members members)>;

}  // namespace fedshard::comm
