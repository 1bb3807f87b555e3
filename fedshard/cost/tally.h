// Flows added up as a machine carries them: by rank, by tier (inside a node, inside a cell of nodes, between cells),
// out of each node, between each two cells, and between groups of ranks.
//
// A surprise: a figure of a rank is that of the one that sends most, found link by link. Closed forms that divide a
// total by the ranks hold where everything divides, and are too low elsewhere.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>

#include "fedshard/cost/flows.h"

namespace fedshard::cost {

// Ranks lie on nodes in order, and nodes in cells. 0: all in one.
struct Placement {
  int ranks_per_node = 0, nodes_per_cell = 0;
  int node_of(int rank) const { return ranks_per_node > 0 ? rank / ranks_per_node : 0; }
  int cell_of(int rank) const { return nodes_per_cell > 0 ? node_of(rank) / nodes_per_cell : 0; }
};

enum class Tier { node, cell, between_cells };  // inside a node; between nodes of a cell; between cells
inline constexpr int kTiers = 3;
const char* name_of(Tier tier);

struct Sum {
  std::int64_t bytes = 0, messages = 0;
  Sum& operator+=(const Sum& more);
  bool operator==(const Sum&) const = default;
};

class Tally {
 public:
  // groups[rank]: the group of ranks that it counts among, for `between_groups`.
  Tally(Placement placement, std::vector<int> groups);

  void add(const Flow& flow);
  FlowSink sink() {
    return [this](const Flow& flow) { add(flow); };
  }

  Sum total(Use use, Tier tier) const { return sums_[at(use)][at(tier)]; }  // all ranks
  Sum total() const;                                                        // likewise
  Sum total(Use use) const;                                                 // likewise
  Sum total(Tier tier) const;                                               // likewise
  std::int64_t between_groups() const { return between_groups_; }           // bytes
  // Bytes of these uses together.
  std::int64_t most_of_a_rank(std::initializer_list<Use> uses = {Use::gather, Use::reduce, Use::replica,
                                                                 Use::aggregate}) const;
  std::int64_t most_messages_of_a_rank() const;
  std::int64_t most_out_of_a_node() const;      // bytes
  std::int64_t most_between_two_cells() const;  // bytes, both directions

 private:
  template <class Enum>
  static std::size_t at(Enum value) {
    return static_cast<std::size_t>(value);
  }
  Placement placement_;
  std::vector<int> groups_;
  std::vector<std::array<std::int64_t, kUses>> sent_;  // by rank
  std::vector<std::int64_t> messages_, out_of_node_;   // by rank, by node
  std::array<std::array<Sum, kTiers>, kUses> sums_{};
  std::map<std::pair<int, int>, std::int64_t> between_cells_;
  std::int64_t between_groups_ = 0;
};

}  // namespace fedshard::cost
