#include "fedshard/nn/unit_module.h"

#include <ATen/ATen.h>

namespace fedshard::nn {

MicroBatch micro_batch_of(const at::Tensor& ids) {
  const std::int64_t length = ids.size(1) - 1;
  const auto part = [&](std::int64_t first) {
    return ids.narrow(1, first, length).to(at::kLong, /*non_blocking=*/false, /*copy=*/true).contiguous();
  };
  return {part(0), part(1)};
}

}  // namespace fedshard::nn
