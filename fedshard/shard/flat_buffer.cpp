#include "fedshard/shard/flat_buffer.h"

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::shard {

void BufferPool::require_stream(at::Device device) {
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (!stream_) stream_ = current;
  base::require(current == *stream_, "flat buffers of one pool are used on the streams {} and {} of {}", stream_->id(),
                current.id(), device.str());
}

c10::DataPtr BufferPool::take(std::size_t bytes, at::Device device) {
  require_stream(device);
  auto& kept = kept_[bytes];
  if (kept.empty()) {
    bytes_ += static_cast<std::int64_t>(bytes);
    peak_bytes_ = std::max(peak_bytes_, bytes_);
    return c10::GetAllocator(device.type())->allocate(bytes);
  }
  c10::DataPtr data = std::move(kept.back());
  kept.pop_back();
  return data;
}

void BufferPool::give_back(c10::DataPtr data, std::size_t bytes) {
  if (owners_.at(bytes).size() > 1) {
    kept_[bytes].push_back(std::move(data));
  } else {
    bytes_ -= static_cast<std::int64_t>(bytes);
    data.clear();
  }
}

FlatBuffer::FlatBuffer(std::int64_t numel, at::ScalarType dtype, at::Device device, BufferPool& pool, int owner)
    : pool_(pool) {
  // A storage of the right size without bytes; at::empty would allocate them first.
  const std::size_t bytes = static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                             c10::DataPtr(nullptr, device),
                                                             c10::GetAllocator(device.type()), /*resizable=*/false));
  pool.register_size(bytes, owner);
  flat_ = at::empty({0}, at::TensorOptions().dtype(dtype).device(device)).set_(storage, 0, {numel}, {1});
}

FlatBuffer::~FlatBuffer() {
  if (present_) let_go();
}

void FlatBuffer::acquire() {
  base::require(!present_, "a flat buffer is acquired twice");
  flat_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(pool_.take(flat_.storage().nbytes(), flat_.device()));
  present_ = true;
}

void FlatBuffer::drop() {
  base::require(present_, "a flat buffer is dropped twice");
  pool_.require_stream(flat_.device());
  let_go();
}

void FlatBuffer::let_go() {
  auto* storage = flat_.storage().unsafeGetStorageImpl();
  pool_.give_back(storage->set_data_ptr(c10::DataPtr(nullptr, flat_.device())), storage->nbytes());
  present_ = false;
}

at::Tensor FlatBuffer::view(std::int64_t offset, at::IntArrayRef shape) const {
  return flat_.narrow(0, offset, c10::multiply_integers(shape)).view(shape).variable_data();
}

}  // namespace fedshard::shard
