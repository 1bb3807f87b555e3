#include "fedshard/cost/collective.h"

#include <bit>

#include "fedshard/base/error.h"

namespace fedshard::cost {
namespace {

void check_ranks(std::int64_t n) {
  if (n < 1) base::fail<base::UsageError>("a collective has at least 1 rank, not {}", n);
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Of all ranks alike.
CollectiveCost alike(std::int64_t n, std::int64_t sent, std::int64_t messages) {
  return {sent, messages, messages, n * sent, n * messages};
}

std::int64_t doublings(std::int64_t n) {
  check_ranks(n);
  if (!std::has_single_bit(static_cast<std::uint64_t>(n))) {
    base::fail<base::UsageError>("recursive doubling needs a power of two of ranks, not {}", n);
  }
  return std::bit_width(static_cast<std::uint64_t>(n)) - 1;
}

}  // namespace

CollectiveCost ring_all_gather(std::int64_t n, std::int64_t shard_bytes) {
  check_ranks(n);
  return alike(n, (n - 1) * shard_bytes, n - 1);
}

CollectiveCost ring_all_reduce(std::int64_t n, std::int64_t payload_bytes) {
  check_ranks(n);
  return alike(n, 2 * (n - 1) * ceil_div(payload_bytes, n), 2 * (n - 1));
}

CollectiveCost recursive_all_gather(std::int64_t n, std::int64_t shard_bytes) {
  return alike(n, (n - 1) * shard_bytes, doublings(n));
}

CollectiveCost recursive_all_reduce(std::int64_t n, std::int64_t payload_bytes) {
  return alike(n, 2 * (n - 1) * ceil_div(payload_bytes, n), 2 * doublings(n));
}

CollectiveCost tree_broadcast(std::int64_t n, std::int64_t bytes) {
  check_ranks(n);
  const std::int64_t rounds = std::bit_width(static_cast<std::uint64_t>(n - 1));
  return {rounds * bytes, rounds, rounds, (n - 1) * bytes, n - 1};
}

CollectiveCost chain_broadcast(std::int64_t n, std::int64_t bytes, std::int64_t chunks) {
  check_ranks(n);
  if (chunks < 1) base::fail<base::UsageError>("a broadcast has at least 1 chunk, not {}", chunks);
  if (n == 1) return {};
  return {bytes, chunks, n - 1 + chunks - 1, (n - 1) * bytes, (n - 1) * chunks};
}

CollectiveCost consistency_check(std::int64_t n) {
  check_ranks(n);
  // Rank 0 hears from all and answers all, one after another; in each ring every rank passes on n - 1 messages.
  const std::int64_t barrier = 2 * (n - 1), rings = 2 * (n - 1);
  return {0, (n - 1) + rings, barrier + rings, 0, barrier + n * rings};
}

}  // namespace fedshard::cost
