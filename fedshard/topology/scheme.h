// How a group's replicas share the exchange of a round, and in which pieces it goes.
//
// A surprise: buckets are cut by the elements of the model, not of a rank. So groups of different shard counts cut
// alike and their messages meet; what a rank has of a bucket is at most its size and may be less.
#pragma once
#include <cstdint>
#include <string>

#include "fedshard/topology/layout.h"

namespace fedshard::topology {

// What the R replicas of shard f bring to a round. All schemes lead to the same bits.
enum class Scheme {
  split,   // each brings 1/R of the shard, then they gather it: every network card carries 1/R between groups
  leader,  // replica f mod R brings all of it, and sends what comes back along a chain of the others
  naive    // each brings all of it and meets the same replica of the other groups: R times the bytes between groups
};
const char* name_of(Scheme scheme);

// Elements that a leader's chain of replicas passes on at once.
inline constexpr std::int64_t kLeaderLinkNumel = 1 << 18;

// The elements that travel together.
struct Buckets {
  enum class By { whole, unit, size };  // all at once; each unit of the plan by itself; so many elements
  By by = By::whole;
  std::int64_t numel = 0;  // By::size; over the bounds of units, in their order
  bool operator==(const Buckets&) const = default;
};

// "whole", "unit", or a size in bytes of fp32 elements: a whole number and B, KiB, MiB or GiB, a multiple of 4
// ("25MiB"). Throws UsageError.
Buckets buckets_of(const std::string& text);
// The other way; the size in the largest unit that leaves a whole number.
std::string text_of(const Buckets& buckets);

struct ExchangeRules {
  Scheme scheme = Scheme::split;
  Buckets buckets = {};
  int concurrency = 3;  // buckets under way at once, from 1: one is packed, one travels, one is summed
  bool operator==(const ExchangeRules&) const = default;
};

// Throws UsageError where groups have different numbers of replicas, which naive can't pair.
void check_scheme(Scheme scheme, const Layout& layout);

}  // namespace fedshard::topology
