#include "fedshard/shard/digest.h"

#include <ATen/ATen.h>

#include <cstring>

namespace fedshard::shard {

// Steele, Lea and Flood's SplitMix64 finaliser (OOPSLA 2014), over the index and the bits in turn.
std::uint64_t mix(std::uint64_t global_index, std::uint32_t bits) {
  const auto finalise = [](std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  };
  return finalise(finalise(global_index + 0x9e3779b97f4a7c15ULL) ^ bits);
}

std::uint64_t partial_digest(const plan::ModelPlan& plan, const Arena& arena) {
  std::uint64_t sum = 0;
  for (int u = 0; u < arena.map().units(); ++u) {
    if (plan.units[u].frozen) continue;
    const topology::Range held = arena.map().range(u);
    const float* values = arena.real(u).const_data_ptr<float>();
    for (const plan::GlobalRun& run : plan.global_runs(u, held)) {
      for (std::int64_t i = 0; i < run.range.size(); ++i) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, values + (run.range.begin - held.begin) + i, sizeof bits);
        sum += mix(static_cast<std::uint64_t>(run.index + i), bits);
      }
    }
  }
  return sum;
}

}  // namespace fedshard::shard
