// Buffers whose bytes come and go under views that stay.
//
// A gathered unit is a flat buffer; parameters are views into it, and autograd saves such views for the backward pass.
// Releasing the unit frees the bytes below the same StorageImpl; gathering it again puts bytes back before the backward
// reads them. PyTorch's FSDP does the same by resizing storages.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace fedshard::shard {

// Keeps freed buffers of a size that several owners share (the blocks'), so that gathering one after another allocates
// nothing after the first step. A size that one owner alone uses (the embedding's, the head's) is freed when dropped.
// plan/memory.cpp predicts its bytes and follows the same rules.
//
// On a GPU it relies on one stream: bytes are taken and given back by the thread whose current stream computes with
// them, always the same one, and collectives work on them between an event of that stream and its wait (comm/nccl.h).
// So bytes may change hands at once: whatever the next owner does with them, on that stream or in a collective, comes
// after all that the last one did. No event a buffer, no record_stream, and no allocation that waits for them. Another
// stream is refused. Not safe from several threads; one an engine.
class BufferPool {
 public:
  // Announces that `owner` (a unit) will take buffers of this size, one or more at a time. All owners announce
  // theirs before the first take().
  void register_size(std::size_t bytes, int owner) { owners_[bytes].insert(owner); }
  c10::DataPtr take(std::size_t bytes, at::Device device);
  void give_back(c10::DataPtr data, std::size_t bytes);
  // Throws RunError where this thread's current stream is another one than at the first call. take() asks by itself.
  void require_stream(at::Device device);
  std::int64_t bytes() const { return bytes_; }  // allocated now, in use or kept
  std::int64_t peak_bytes() const { return peak_bytes_; }

 private:
  std::map<std::size_t, std::set<int>> owners_;
  std::map<std::size_t, std::vector<c10::DataPtr>> kept_;
  std::int64_t bytes_ = 0, peak_bytes_ = 0;
  std::optional<c10::Stream> stream_;
};

// `pool` must outlive the buffer. `owner` is whoever the pool shall know it by: the index of its unit.
class FlatBuffer {
 public:
  FlatBuffer(std::int64_t numel, at::ScalarType dtype, at::Device device, BufferPool& pool, int owner);
  ~FlatBuffer();
  FlatBuffer(const FlatBuffer&) = delete;
  FlatBuffer& operator=(const FlatBuffer&) = delete;

  bool present() const { return present_; }
  void acquire();  // afterwards the bytes are there, with undefined content
  void drop();     // views stay valid as objects but must not be read or written until the next acquire()
  const at::Tensor& flat() const { return flat_; }  // [numel]
  // A view of `shape` from element `offset` on with a version counter of its own: writing the buffer through flat()
  // doesn't make autograd refuse what it saved of the view.
  at::Tensor view(std::int64_t offset, at::IntArrayRef shape) const;

 private:
  void let_go();

  BufferPool& pool_;
  at::Tensor flat_;
  bool present_ = false;
};

}  // namespace fedshard::shard
