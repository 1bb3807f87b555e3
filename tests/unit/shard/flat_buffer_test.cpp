// Flat buffers and streams, on a device that exists in name only: its streams are numbers and its memory is the CPU's.
#include "fedshard/shard/flat_buffer.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <gtest/gtest.h>

#include "fedshard/base/error.h"

namespace fedshard::shard {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

class FakeDevice {
 public:
  FakeDevice() {
    c10::impl::device_guard_impl_registry[static_cast<std::size_t>(kType)].store(&guard_);
    c10::SetAllocator(kType, c10::GetCPUAllocator());
  }
  ~FakeDevice() {
    c10::impl::FakeGuardImpl<kType>::resetStreams();
    // Autograd would start threads for the device.
    c10::impl::device_guard_impl_registry[static_cast<std::size_t>(kType)].store(nullptr);
  }
  at::Device device() const { return {kType, 0}; }
  void use_stream(c10::StreamId id) { guard_.exchangeStream(c10::Stream(c10::Stream::UNSAFE, device(), id)); }

 private:
  c10::impl::FakeGuardImpl<kType> guard_;
};

TEST(BufferPool, ServesOneStreamWhicheverThatIs) {
  FakeDevice fake;
  fake.use_stream(7);
  BufferPool pool;
  pool.register_size(64, 0);
  pool.register_size(64, 1);
  c10::DataPtr data = pool.take(64, fake.device());
  void* const place = data.get();
  pool.give_back(std::move(data), 64);
  EXPECT_EQ(pool.take(64, fake.device()).get(), place);
}

TEST(BufferPool, RefusesAnotherStreamUntilTheFirstIsBack) {
  FakeDevice fake;
  BufferPool pool;
  pool.register_size(64, 0);
  pool.register_size(64, 1);
  pool.give_back(pool.take(64, fake.device()), 64);
  fake.use_stream(3);
  EXPECT_THROW(pool.take(64, fake.device()), base::RunError);
  EXPECT_THROW(pool.require_stream(fake.device()), base::RunError);
  EXPECT_EQ(pool.bytes(), 64);
  fake.use_stream(0);
  EXPECT_NE(pool.take(64, fake.device()).get(), nullptr);
}

}  // namespace
}  // namespace fedshard::shard
