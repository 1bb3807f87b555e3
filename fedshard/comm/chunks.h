// How a buffer is cut into one chunk a member, and what a ring sends of it (cost.md, section 1).
// A surprise: NCCL moves its bytes itself and may choose trees or switches; what is counted for it is what a ring
// sends, so that one closed form holds for every backend.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace fedshard::comm {

// n + 1 offsets that cut `numel` elements as evenly as whole elements allow.
std::vector<std::int64_t> even_offsets(std::int64_t numel, int n);

// Elements that `member` sends in a ring all-gather of these chunks: all but the next member's chunk.
std::int64_t sent_by_gather(std::span<const std::int64_t> offsets, int member);

// The same in a ring reduce-scatter: all but its own chunk.
std::int64_t sent_by_reduce(std::span<const std::int64_t> offsets, int member);

}  // namespace fedshard::comm
