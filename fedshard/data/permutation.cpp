#include "fedshard/data/permutation.h"

#include <algorithm>
#include <bit>

#include "fedshard/base/error.h"

namespace fedshard::data {
namespace {

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(std::int64_t n, std::uint64_t seed, std::int64_t epoch) : n_(static_cast<std::uint64_t>(n)) {
  base::require(n >= 1, "a permutation of {} things", n);
  half_bits_ = std::max(1, (static_cast<int>(std::bit_width(n_ - 1)) + 1) / 2);
  std::uint64_t key = mix(mix(seed) ^ static_cast<std::uint64_t>(epoch));
  for (std::uint64_t& round_key : keys_) round_key = key = mix(key);
}

std::int64_t Permutation::operator()(std::int64_t index) const {
  auto value = static_cast<std::uint64_t>(index);
  base::require(value < n_, "index {} of a permutation of {}", index, n_);
  do {
    value = pass(value);
  } while (value >= n_);
  return static_cast<std::int64_t>(value);
}

std::uint64_t Permutation::pass(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (const std::uint64_t key : keys_) {
    // The top bits of the mixed value are used: they depend on all bits of its input.
    const std::uint64_t next = left ^ (mix(right ^ key) >> (64 - half_bits_));
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

}  // namespace fedshard::data
