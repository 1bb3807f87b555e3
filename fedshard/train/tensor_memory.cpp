#include "fedshard/train/tensor_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <malloc.h>

#include <atomic>

namespace fedshard::train {
namespace {

std::atomic<std::int64_t> live{0}, peak{0};

void add(std::int64_t bytes) {
  const std::int64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::int64_t before = peak.load(std::memory_order_relaxed);
  while (now > before && !peak.compare_exchange_weak(before, now, std::memory_order_relaxed)) {
  }
}

void release(void* data) {
  if (data == nullptr) return;
  add(-static_cast<std::int64_t>(::malloc_usable_size(data)));
  c10::free_cpu(data);
}

// LibTorch's own, with the count.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const data = c10::alloc_cpu(bytes);
    if (data != nullptr) add(static_cast<std::int64_t>(::malloc_usable_size(data)));
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

void count_tensor_memory() {
  static CountingAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);  // above the built-in's 0
}

std::int64_t peak_tensor_bytes() { return peak.load(std::memory_order_relaxed); }

std::int64_t restart_peak_tensor_bytes() {
  const std::int64_t now = live.load(std::memory_order_relaxed);
  peak.store(now, std::memory_order_relaxed);
  return now;
}

}  // namespace fedshard::train
