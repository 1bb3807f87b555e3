// A seeded permutation of [0, n) that takes no memory, so that n may be billions.
// Surprising: it is a cipher. A Feistel network permutes the smallest even power of two that holds n, and an index that
// lands outside [0, n) is sent through again until it lands inside (cycle walking; less than 4 passes on average).
// Sources: Luby and Rackoff 1988; Black and Rogaway 2002 (cycle walking); round function: the finalizer of SplitMix64.
#pragma once
#include <array>
#include <cstdint>

namespace fedshard::data {

class Permutation {
 public:
  // Of [0, n), n >= 1. The same (n, seed, epoch) give the same permutation in every version of fedshard: resumed runs
  // rely on it.
  Permutation(std::int64_t n, std::uint64_t seed, std::int64_t epoch);

  // Where `index` in [0, n) goes. Safe from any thread.
  std::int64_t operator()(std::int64_t index) const;

 private:
  static constexpr int kRounds = 8;
  std::uint64_t pass(std::uint64_t value) const;

  std::uint64_t n_;
  int half_bits_;
  std::array<std::uint64_t, kRounds> keys_;
};

}  // namespace fedshard::data
