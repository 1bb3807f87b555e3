#include "fedshard/cost/tally.h"

#include <algorithm>

namespace fedshard::cost {
namespace {

std::int64_t most_of(const std::vector<std::int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

}  // namespace

Sum& Sum::operator+=(const Sum& more) {
  bytes += more.bytes;
  messages += more.messages;
  return *this;
}

const char* name_of(Tier tier) {
  constexpr const char* kNames[] = {"node", "cell", "between_cells"};
  return kNames[static_cast<int>(tier)];
}

Tally::Tally(Placement placement, std::vector<int> groups)
    : placement_(placement), groups_(std::move(groups)), sent_(groups_.size()), messages_(groups_.size()) {
  const int nodes = groups_.empty() ? 0 : placement_.node_of(static_cast<int>(groups_.size()) - 1) + 1;
  out_of_node_.resize(static_cast<std::size_t>(nodes));
}

void Tally::add(const Flow& flow) {
  const auto from = static_cast<std::size_t>(flow.from), to = static_cast<std::size_t>(flow.to);
  sent_[from][at(flow.use)] += flow.bytes;
  messages_[from] += flow.messages;
  if (groups_[from] != groups_[to]) between_groups_ += flow.bytes;
  const int node = placement_.node_of(flow.from), cell = placement_.cell_of(flow.from),
            to_cell = placement_.cell_of(flow.to);
  const bool leaves_node = node != placement_.node_of(flow.to);
  const Tier tier = cell != to_cell ? Tier::between_cells : leaves_node ? Tier::cell : Tier::node;
  sums_[at(flow.use)][at(tier)] += {flow.bytes, flow.messages};
  if (leaves_node) out_of_node_[static_cast<std::size_t>(node)] += flow.bytes;
  if (cell != to_cell) between_cells_[std::minmax(cell, to_cell)] += flow.bytes;
}

Sum Tally::total() const {
  Sum sum;
  for (const auto& of_use : sums_) {
    for (const Sum& of_tier : of_use) sum += of_tier;
  }
  return sum;
}

Sum Tally::total(Use use) const {
  Sum sum;
  for (const Sum& of_tier : sums_[at(use)]) sum += of_tier;
  return sum;
}

Sum Tally::total(Tier tier) const {
  Sum sum;
  for (const auto& of_use : sums_) sum += of_use[at(tier)];
  return sum;
}

std::int64_t Tally::most_of_a_rank(std::initializer_list<Use> uses) const {
  std::int64_t most = 0;
  for (const auto& of_rank : sent_) {
    std::int64_t bytes = 0;
    for (const Use use : uses) bytes += of_rank[at(use)];
    most = std::max(most, bytes);
  }
  return most;
}

std::int64_t Tally::most_messages_of_a_rank() const { return most_of(messages_); }
std::int64_t Tally::most_out_of_a_node() const { return most_of(out_of_node_); }

std::int64_t Tally::most_between_two_cells() const {
  std::int64_t most = 0;
  for (const auto& [cells, bytes] : between_cells_) most = std::max(most, bytes);
  return most;
}

}  // namespace fedshard::cost
