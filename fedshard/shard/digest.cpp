#include "fedshard/shard/digest.h"

#include <ATen/ATen.h>

#include <cstring>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::shard {
namespace {

std::uint64_t of_halves(const std::vector<double>& halves) {
  return static_cast<std::uint64_t>(halves[0]) << 32 | static_cast<std::uint64_t>(halves[1]);
}

// Two ranks whose digests differ, if a rank has heard of any.
struct Finding {
  int first = -1, second = -1;
};

void compare_along(comm::Communicator& axis, std::uint64_t digest, Finding& mine) {
  const auto [high, low] = halves_of(digest);
  const std::array<double, 4> words{high, low, static_cast<double>(mine.first), static_cast<double>(mine.second)};
  const auto all = axis.collect(words);
  for (std::size_t i = 0; i < all.size() && mine.first < 0; ++i) {
    if (all[i][2] >= 0) {
      mine.first = static_cast<int>(all[i][2]);
      mine.second = static_cast<int>(all[i][3]);
    } else if (of_halves(all[i]) != of_halves(all[0])) {
      mine.first = axis.members().ranks[0];
      mine.second = axis.members().ranks[i];
    }
  }
}

std::uint64_t over_shards(std::uint64_t partial, comm::Axes& axes) {
  std::uint64_t digest = 0;
  for (const auto& part : axes.shard->collect(halves_of(partial))) digest += of_halves(part);
  return digest;
}

std::uint64_t digest_of_piece(const plan::ModelPlan& plan, const Arena& arena, const ArenaPiece& piece) {
  std::uint64_t sum = 0;
  const at::Tensor on_host = arena.slice(piece.unit, piece.range).to(at::kCPU, at::kFloat);
  const float* values = on_host.const_data_ptr<float>();
  for (const plan::GlobalRun& run : plan.global_runs(piece.unit, piece.range)) {
    for (std::int64_t i = 0; i < run.range.size(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, values + (run.range.begin - piece.range.begin) + i, sizeof bits);
      sum += mix(static_cast<std::uint64_t>(run.index + i), bits);
    }
  }
  return sum;
}

}  // namespace

std::array<double, 2> halves_of(std::uint64_t digest) {
  return {static_cast<double>(digest >> 32), static_cast<double>(digest & 0xffffffffu)};
}

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
  for (const ArenaPiece& piece : arena.map().pieces()) {
    if (plan.units[piece.unit].is_exchanged()) sum += digest_of_piece(plan, arena, piece);
  }
  return sum;
}

std::uint64_t partial_group_local_digest(const plan::ModelPlan& plan, const Arena& arena) {
  std::uint64_t sum = 0;
  for (const ArenaPiece& piece : arena.map().pieces()) {
    if (plan.units[piece.unit].group_local) sum += digest_of_piece(plan, arena, piece);
  }
  return sum;
}

std::uint64_t agreed_digest(const plan::ModelPlan& plan, const Arena& arena, comm::Axes& axes) {
  const std::uint64_t digest = over_shards(partial_digest(plan, arena), axes);
  const std::uint64_t group_local = over_shards(partial_group_local_digest(plan, arena), axes);
  Finding mine;
  // In this order: every rank has a peer in each group, and hears of a difference between that group's replicas.
  compare_along(*axes.replica, digest + group_local, mine);
  compare_along(*axes.federation, digest, mine);
  if (mine.first >= 0) {
    base::fail<base::RunError>("ranks {} and {} should hold the same model but hold different parameters", mine.first,
                               mine.second);
  }
  return digest;
}

}  // namespace fedshard::shard
