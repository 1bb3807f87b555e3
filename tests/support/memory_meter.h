// Counts the bytes of tensors that the calling thread allocates and frees on the CPU while a meter lives.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace fedshard::testing_support {

// Allocations of other threads are not seen; freeing what is older than the meter is not counted.
class MemoryMeter {
 public:
  MemoryMeter() : report_(std::make_shared<Report>()), guard_(c10::DebugInfoKind::PROFILER_STATE, report_) {}
  std::int64_t live() const { return report_->live; }
  std::int64_t peak() const { return report_->peak; }

 private:
  struct Report final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t, c10::Device) override {
      live += size;
      peak = std::max(peak, live);
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::int64_t live = 0, peak = 0;
  };
  std::shared_ptr<Report> report_;
  c10::DebugInfoGuard guard_;
};

}  // namespace fedshard::testing_support
