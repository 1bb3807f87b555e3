// What a collective over n ranks sends, in messages and in rounds that follow each other: the textbook's closed forms
// (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005). They are the
// analysis of docs/cost.md; flows.h counts a layout's messages link by link instead.
#pragma once
#include <cstdint>

namespace fedshard::cost {

struct CollectiveCost {
  std::int64_t sent = 0;            // bytes of the rank that sends most
  std::int64_t messages = 0;        // likewise
  std::int64_t rounds = 0;          // one after another
  std::int64_t total = 0;           // bytes of all ranks
  std::int64_t total_messages = 0;  // likewise
  bool operator==(const CollectiveCost&) const = default;
};

// n from 1; of one rank nothing. `shard_bytes`: what each rank brings (all-gather) or is left with (reduce-scatter).
CollectiveCost ring_all_gather(std::int64_t n, std::int64_t shard_bytes);
inline CollectiveCost ring_reduce_scatter(std::int64_t n, std::int64_t shard_bytes) {
  return ring_all_gather(n, shard_bytes);
}
// Of n parts of ceil(payload_bytes / n).
CollectiveCost ring_all_reduce(std::int64_t n, std::int64_t payload_bytes);

// Doubling (all-gather) or halving (reduce-scatter), and both (Rabenseifner's all-reduce). Throw UsageError unless n is
// a power of two.
CollectiveCost recursive_all_gather(std::int64_t n, std::int64_t shard_bytes);
CollectiveCost recursive_all_reduce(std::int64_t n, std::int64_t payload_bytes);

// A binomial tree; a chain that passes on `chunks` equal pieces, of which each is sent when it has come.
CollectiveCost tree_broadcast(std::int64_t n, std::int64_t bytes);
CollectiveCost chain_broadcast(std::int64_t n, std::int64_t bytes, std::int64_t chunks);

// What PyTorch's ProcessGroupWrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL) sends before every collective, from host to host:
// a barrier through rank 0 and two ring all-gathers. `rounds` is what makes a call's cost grow with n.
CollectiveCost consistency_check(std::int64_t n);

}  // namespace fedshard::cost
