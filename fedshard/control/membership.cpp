#include "fedshard/control/membership.h"

#include <algorithm>
#include <cstddef>

#include "fedshard/base/error.h"

namespace fedshard::control {

const char* name_of(RankState state) {
  switch (state) {
    case RankState::expected:
      return "expected";
    case RankState::joined:
      return "joined";
    case RankState::training:
      return "training";
    case RankState::failed:
      return "failed";
    case RankState::ended:
      return "ended";
  }
  return "?";
}

bool is_legal(RankState from, RankState to) {
  switch (from) {
    case RankState::expected:
      return to == RankState::joined || to == RankState::failed;
    case RankState::joined:
      return to == RankState::training || to == RankState::failed || to == RankState::ended;
    case RankState::training:
      return to == RankState::failed || to == RankState::ended;
    case RankState::failed:
    case RankState::ended:
      return false;
  }
  return false;
}

Membership::Membership(const std::vector<int>& group_sizes) {
  if (group_sizes.empty()) base::fail<base::UsageError>("a world needs at least one group");
  for (std::size_t group = 0; group < group_sizes.size(); ++group) {
    const int size = group_sizes[group];
    if (size < 1) base::fail<base::UsageError>("group {} has {} ranks: a group needs at least one", group, size);
    first_ranks_.push_back(static_cast<int>(groups_.size()));
    groups_.insert(groups_.end(), static_cast<std::size_t>(size), static_cast<int>(group));
  }
  states_.assign(groups_.size(), RankState::expected);
}

std::vector<int> Membership::in_state(RankState state) const {
  std::vector<int> found;
  for (int rank = 0; rank < ranks(); ++rank) {
    if (this->state(rank) == state) found.push_back(rank);
  }
  return found;
}

bool Membership::is_over() const {
  return std::all_of(states_.begin(), states_.end(),
                     [](RankState s) { return s == RankState::failed || s == RankState::ended; });
}

void Membership::move(int rank, RankState to) {
  const RankState from = state(rank);
  if (!is_legal(from, to)) {
    base::fail<base::RunError>("{} cannot go from {} to {}", rank_name(rank, group_of(rank)), name_of(from),
                               name_of(to));
  }
  states_[static_cast<std::size_t>(rank)] = to;
}

std::string rank_name(int rank, int group) { return fmt::format("rank {} (group {})", rank, group); }

std::string_view own_words(int rank, int group, std::string_view words) {
  for (const std::string& name : {rank_name(rank, group), fmt::format("rank {}", rank)}) {
    for (const char* end : {": ", " "}) {
      if (words.starts_with(name + end)) return words.substr((name + end).size());
    }
  }
  return words;
}

std::string list_ranks(const std::vector<int>& ascending) {
  if (ascending.empty()) return "no rank";
  std::string text = ascending.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ascending.size();) {
    std::size_t last = i;
    while (last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1) ++last;
    if (last < i + 2) last = i;  // a run of two is a list
    if (i > 0) text += ", ";
    text += last == i ? fmt::format("{}", ascending[i]) : fmt::format("{}-{}", ascending[i], ascending[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace fedshard::control
