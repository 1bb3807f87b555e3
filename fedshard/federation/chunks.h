// A slice piece by piece: of a piece a copy, in fp32 or of what a step would make of it, costs no memory to speak of.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "fedshard/topology/ranges.h"

namespace fedshard::federation {

inline std::vector<topology::Range> chunks_of(std::int64_t numel) {
  constexpr std::int64_t kElements = 1 << 16;
  std::vector<topology::Range> chunks;
  for (std::int64_t begin = 0; begin < numel; begin += kElements) {
    chunks.push_back({begin, std::min(begin + kElements, numel)});
  }
  return chunks;
}

}  // namespace fedshard::federation
