// NCCL between the GPUs of a run, through c10d's ProcessGroupNCCL. nccl.cpp is the only file with CUDA code; a build
// without CUDA has nccl_absent.cpp in its place, where each of these functions refuses.
//
// Tensors on the GPU go over NCCL, tensors on the CPU (control values, what groups exchange) over a communicator of the
// same members that the caller brings: NCCL moves nothing between hosts' memories, and a group with NCCL alone could
// not sum a loss.
#pragma once
#include <c10/core/Device.h>

#include <chrono>
#include <memory>
#include <optional>

#include "fedshard/comm/communicator.h"
#include "fedshard/comm/store.h"

namespace fedshard::comm {

// Throws UsageError where this program was built without CUDA.
void require_nccl();

// The GPU of the process that is the `local_rank`-th of its node; it becomes this thread's device. Throws UsageError
// where the launcher did not say or the node has no such GPU.
at::Device gpu_of(std::optional<int> local_rank);

struct NcclOptions {
  at::Device device;                   // from gpu_of
  std::chrono::milliseconds deadline;  // of every operation, from the call that began it
  Connect host;                        // makes the communicators for tensors on the CPU
};

// What the contract of communicator.h means on a GPU: an operation begins when what the calling thread's current stream
// holds at the call is done; Work::wait() makes the current stream wait and returns at once. The caller may thus read,
// overwrite or free the buffer with kernels of that stream after wait(), and need not record it on another stream.
// `after` must come from tensors on the same kind of device. Called from one thread at a time, and in the same order
// over all communicators on all ranks: NCCL's kernels of several communicators wait for one another on a GPU.
//
// An operation that fails or misses the deadline aborts all of this rank's, and the next call or wait() on any of them
// throws PeersLostError naming it. Until then kernels compute with what happens to lie in its buffer, so nothing
// derived from it may be kept before the next call has returned.
//
// `counter` must outlive the communicators.
Connect connect_over_nccl(std::shared_ptr<Store> store, NcclOptions options, TrafficCounter& counter, Watcher watcher);

}  // namespace fedshard::comm
