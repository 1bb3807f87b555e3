#include "fedshard/comm/chunks.h"

namespace fedshard::comm {
namespace {

std::int64_t all_but(std::span<const std::int64_t> offsets, std::size_t chunk) {
  return offsets.back() - offsets.front() - (offsets[chunk + 1] - offsets[chunk]);
}

}  // namespace

std::vector<std::int64_t> even_offsets(std::int64_t numel, int n) {
  std::vector<std::int64_t> offsets;
  for (int i = 0; i <= n; ++i) offsets.push_back(numel * i / n);
  return offsets;
}

std::int64_t sent_by_gather(std::span<const std::int64_t> offsets, int member) {
  const std::size_t members = offsets.size() - 1;
  return all_but(offsets, (static_cast<std::size_t>(member) + 1) % members);
}

std::int64_t sent_by_reduce(std::span<const std::int64_t> offsets, int member) {
  return all_but(offsets, static_cast<std::size_t>(member));
}

}  // namespace fedshard::comm
