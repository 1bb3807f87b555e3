// nccl.h in a build without CUDA.
#include "fedshard/base/error.h"
#include "fedshard/comm/nccl.h"

namespace fedshard::comm {
namespace {

[[noreturn]] void refuse() {
  base::fail<base::UsageError>(
      "[comm] backend = \"nccl\" needs a build with CUDA, which this program is not: configure with -DFEDSHARD_CUDA=ON "
      "(docs/install.md), or set \"gloo\" or \"auto\"");
}

}  // namespace

void require_nccl() { refuse(); }

at::Device gpu_of(std::optional<int>) { refuse(); }

Connect connect_over_nccl(std::shared_ptr<Store>, NcclOptions, TrafficCounter&, Watcher) { refuse(); }

}  // namespace fedshard::comm
