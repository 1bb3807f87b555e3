#include "fedshard/cost/flows.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/topology/ranges.h"

namespace fedshard::cost {
namespace {

constexpr std::int64_t kFp32 = 4;

// A collective over `ranks`, whose members have chunks of so many bytes, `times` times.
struct Collective {
  const std::vector<int>& ranks;
  std::vector<std::int64_t> chunks;
  Use use;
  std::int64_t times = 1;
  std::int64_t size() const { return std::ssize(ranks); }
};

void send(const Collective& c, std::int64_t from, std::int64_t to, std::int64_t bytes, std::int64_t messages,
          const FlowSink& out) {
  if (bytes == 0 || c.times == 0) return;
  out({c.ranks[static_cast<std::size_t>(from)], c.ranks[static_cast<std::size_t>(to)], c.use, bytes * c.times,
       messages * c.times});
}

// To the next member all chunks but one: its own chunk (gather), or this member's (reduce).
void ring(const Collective& c, bool gathers, const FlowSink& out) {
  const std::int64_t n = c.size();
  for (std::int64_t m = 0; m < n && n > 1; ++m) {
    const std::int64_t next = (m + 1) % n, left_out = gathers ? next : m;
    std::int64_t bytes = 0, messages = 0;
    for (std::int64_t chunk = 0; chunk < n; ++chunk) {
      if (chunk == left_out) continue;
      bytes += c.chunks[static_cast<std::size_t>(chunk)];
      messages += c.chunks[static_cast<std::size_t>(chunk)] > 0;
    }
    send(c, m, next, bytes, messages, out);
  }
}

// In the round of distance d each member sends its partner, m xor d, an aligned block of d chunks: the one that it has
// (gather), or the one that the partner is left with (reduce).
void recursive(const Collective& c, bool gathers, const FlowSink& out) {
  const std::int64_t n = c.size();
  if (!std::has_single_bit(static_cast<std::uint64_t>(n))) {
    base::fail<base::UsageError>("the recursive algorithm needs a power of two of ranks, and not {}", n);
  }
  for (std::int64_t distance = 1; distance < n; distance *= 2) {
    for (std::int64_t m = 0; m < n; ++m) {
      const std::int64_t partner = m ^ distance, first = (gathers ? m : partner) / distance * distance;
      const auto begin = c.chunks.begin() + first;
      send(c, m, partner, std::accumulate(begin, begin + distance, std::int64_t{0}), 1, out);
    }
  }
}

void run(Algorithm algorithm, const Collective& c, bool gathers, const FlowSink& out) {
  algorithm == Algorithm::ring ? ring(c, gathers, out) : recursive(c, gathers, out);
}

std::vector<std::int64_t> equal_chunks(std::int64_t n, std::int64_t bytes) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(n), bytes);
}

// As evenly as whole elements allow (comm/chunks.h).
std::vector<std::int64_t> even_chunks(std::int64_t numel, std::int64_t n, std::int64_t bytes_of_element) {
  std::vector<std::int64_t> chunks;
  for (std::int64_t i = 0; i < n; ++i) chunks.push_back((numel * (i + 1) / n - numel * i / n) * bytes_of_element);
  return chunks;
}

// A step's collectives on one shard axis and one replica axis.
void step_of_shard_axis(const plan::ModelPlan& plan, const std::vector<int>& ranks, const TrafficOptions& options,
                        const UnitUses& uses, Algorithm algorithm, const FlowSink& out) {
  const std::int64_t shards = std::ssize(ranks);
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    const std::int64_t numel = plan.units[u].shard_numel(shards);
    const auto chunks = [&](std::int64_t bytes) { return equal_chunks(shards, numel * bytes); };
    run(algorithm, {ranks, chunks(options.bytes_gather), Use::gather, uses.gathers[u]}, true, out);
    run(algorithm, {ranks, chunks(kFp32), Use::gather, uses.update_gathers[u]}, true, out);
    run(algorithm, {ranks, chunks(options.bytes_reduce), Use::reduce, uses.reductions[u]}, false, out);
  }
}

void step_of_replica_axis(const plan::ModelPlan& plan, const std::vector<int>& ranks, std::int64_t shards,
                          const TrafficOptions& options, const UnitUses& uses, Algorithm algorithm,
                          const FlowSink& out) {
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    const auto chunks = even_chunks(plan.units[u].shard_numel(shards), std::ssize(ranks), options.bytes_reduce);
    const Collective c{ranks, chunks, Use::replica, uses.reductions[u]};
    run(algorithm, c, false, out);
    run(algorithm, c, true, out);
  }
}

using Kept = std::vector<std::vector<topology::Range>>;  // by unit

// What is exchanged once: parameters, or moments that not every element has.
struct Exchanged {
  Kept kept;
  std::int64_t bytes_of_element = kFp32;
  plan::Compression compression = {};
  std::int64_t bytes(std::int64_t numel) const {
    return compression.kind == plan::Compression::Kind::none ? numel * bytes_of_element
                                                             : plan::encoded_bytes(compression, numel);
  }
};

std::vector<topology::Range> held_of(const Kept& kept, int unit, topology::Range range) {
  std::vector<topology::Range> held;
  for (const topology::Range& k : kept[static_cast<std::size_t>(unit)]) {
    const topology::Range both{std::max(k.begin, range.begin), std::min(k.end, range.end)};
    if (both.size() > 0) held.push_back(both);
  }
  return held;
}

// Bytes and messages of some parts, which a bucket's message to a peer holds together.
class Load {
 public:
  void add(std::int64_t bytes, std::int64_t bucket) {
    if (bytes == 0) return;
    bytes_ += bytes;
    messages_ += bucket != last_bucket_;  // parts come bucket after bucket
    last_bucket_ = bucket;
  }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t messages() const { return messages_; }

 private:
  std::int64_t bytes_ = 0, messages_ = 0, last_bucket_ = -1;
};

std::int64_t bytes_of(const Exchanged& what, const topology::ExchangePart& part) {
  std::int64_t bytes = 0;
  for (const topology::Range& held : held_of(what.kept, part.unit, part.range)) bytes += what.bytes(held.size());
  return bytes;
}

void send(int from, int to, const Load& load, const FlowSink& out) {
  if (load.bytes() > 0) out({from, to, Use::aggregate, load.bytes(), load.messages()});
}

// To the owners what they sum, and to the other holders what this rank's group has summed.
void exchange_of_rank(const topology::Layout& layout, const std::vector<std::int64_t>& unit_numel, int rank,
                      const topology::ExchangeRules& rules, const Exchanged& what, const FlowSink& out) {
  const int group = layout.group_of(rank);
  std::map<int, Load> to_owner, back;  // by peer
  for (const topology::ExchangePart& part : topology::exchange_parts(layout, unit_numel, rank, rules)) {
    const std::int64_t bytes = bytes_of(what, part);
    if (part.owner != group) {
      to_owner[part.holders[static_cast<std::size_t>(part.owner)]].add(bytes, part.bucket);
      continue;
    }
    for (const int holder : part.holders) {
      if (holder != rank) back[holder].add(bytes, part.bucket);
    }
  }
  for (const auto& [peer, load] : to_owner) send(rank, peer, load, out);
  for (const auto& [peer, load] : back) send(rank, peer, load, out);
}

// The same of a rank of the first of equal groups and of its twins in all others, which have the same parts.
void exchange_of_twins(const topology::Layout& layout, const std::vector<std::int64_t>& unit_numel, int rank,
                       const topology::ExchangeRules& rules, const Exchanged& what, const FlowSink& out) {
  std::vector<Load> of_owner(static_cast<std::size_t>(layout.groups()));
  for (const topology::ExchangePart& part : topology::exchange_parts(layout, unit_numel, rank, rules)) {
    of_owner[static_cast<std::size_t>(part.owner)].add(bytes_of(what, part), part.bucket);
  }
  const std::vector<int> twins = layout.federation_peers(rank);
  for (std::size_t from = 0; from < twins.size(); ++from) {
    for (std::size_t to = 0; to < twins.size(); ++to) {
      if (from == to) continue;
      send(twins[from], twins[to], of_owner[to], out);
      send(twins[from], twins[to], of_owner[from], out);
    }
  }
}

// What the replicas of a shard have exchanged, to each other; not compressed.
void gather_of_replicas(const topology::Layout& layout, const std::vector<std::int64_t>& unit_numel, int first,
                        topology::Scheme scheme, const Exchanged& what, const FlowSink& out) {
  const topology::Coordinates at = layout.at(first);
  const topology::GroupShape& shape = layout.group(at.group);
  if (shape.replicas == 1 || scheme == topology::Scheme::naive) return;
  std::vector<std::int64_t> numel;
  for (int replica = 0; replica < shape.replicas; ++replica) {
    numel.push_back(0);
    for (int u = 0; u < std::ssize(unit_numel); ++u) {
      const auto slice =
          topology::slice_range(unit_numel[static_cast<std::size_t>(u)], shape, replica, at.shard, scheme);
      for (const topology::Range& held : held_of(what.kept, u, slice)) numel.back() += held.size();
    }
  }
  const std::vector<int> ranks = layout.replica_peers(first);
  const auto link = scheme == topology::Scheme::leader ? topology::kLeaderLinkNumel : std::int64_t{1} << 62;
  const std::int64_t most = *std::max_element(numel.begin(), numel.end());
  for (std::int64_t begin = 0; begin < most; begin += std::min(link, most)) {
    std::vector<std::int64_t> chunks;
    for (const std::int64_t count : numel) {
      chunks.push_back(std::clamp(count - begin, std::int64_t{0}, link) * what.bytes_of_element);
    }
    ring({ranks, chunks, Use::aggregate}, true, out);
  }
}

void exchange_flows(const topology::Layout& layout, const std::vector<std::int64_t>& unit_numel,
                    const topology::ExchangeRules& rules, const Exchanged& what, const FlowSink& out) {
  const bool twins = layout.equal_groups();
  for (int rank = 0; rank < layout.world(); ++rank) {
    const topology::Coordinates at = layout.at(rank);
    if (!twins) exchange_of_rank(layout, unit_numel, rank, rules, what, out);
    if (twins && at.group == 0) exchange_of_twins(layout, unit_numel, rank, rules, what, out);
    if (at.replica == 0) gather_of_replicas(layout, unit_numel, rank, rules.scheme, what, out);
  }
}

}  // namespace

const char* name_of(Use use) {
  constexpr const char* kNames[] = {"gather", "reduce", "replica", "aggregate"};
  return kNames[static_cast<int>(use)];
}

UnitUses uses_of(const plan::ModelPlan& plan, const TrafficOptions& options) {
  const std::vector<std::int64_t> none(plan.units.size(), 0);
  UnitUses uses{none, none, none};
  const plan::UpdateRules rules = plan::update_rules(plan, options.updates);
  const auto has_muon = [&](std::size_t unit) {
    return std::any_of(rules[unit].begin(), rules[unit].end(),
                       [](const plan::UpdateRule& rule) { return rule.update == plan::Update::muon; });
  };
  for (const plan::Op& op : plan::step_schedule(plan, options.schedule)) {
    const auto unit = static_cast<std::size_t>(op.unit);
    if (op.kind == plan::OpKind::gather) ++uses.gathers[unit];
    if (op.kind == plan::OpKind::reduce) ++uses.reductions[unit];
    if (op.kind == plan::OpKind::step && has_muon(unit)) ++uses.update_gathers[unit];
  }
  return uses;
}

std::int64_t collectives_of(const UnitUses& uses, const topology::GroupShape& group) {
  const auto sum = [](const std::vector<std::int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  };
  const std::int64_t sharded = sum(uses.gathers) + sum(uses.update_gathers) + sum(uses.reductions);
  return (group.shards > 1 ? sharded : 0) + (group.replicas > 1 ? sum(uses.reductions) : 0);
}

void step_flows(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options,
                const UnitUses& uses, Algorithm algorithm, const FlowSink& out) {
  for (int rank = 0; rank < layout.world(); ++rank) {
    const topology::Coordinates at = layout.at(rank);
    if (at.shard == 0) step_of_shard_axis(plan, layout.shard_peers(rank), options, uses, algorithm, out);
    if (at.replica > 0) continue;
    step_of_replica_axis(plan, layout.replica_peers(rank), layout.group(at.group).shards, options, uses, algorithm,
                         out);
  }
}

void round_flows(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options,
                 const FlowSink& out) {
  if (layout.groups() == 1) return;
  const std::vector<std::int64_t> unit_numel = plan.exchanged_numel_by_unit();
  Kept all;
  for (const std::int64_t numel : unit_numel) all.push_back({{0, numel}});
  exchange_flows(layout, unit_numel, options.exchange, {all, options.bytes_aggregate, options.compression}, out);
  if (!options.average_moments) return;
  const plan::UpdateRules rules = plan::update_rules(plan, options.updates);
  for (int moment = 1; moment <= plan::moment_counts(rules).most; ++moment) {
    exchange_flows(layout, unit_numel, options.exchange, {plan::moment_ranges(plan, rules, moment, 1, 0)}, out);
  }
}

}  // namespace fedshard::cost
