// Which ranks there are and what has become of each.
// The surprising part: `failed` and `ended` are final. A rank that comes back would be a new member; there is none yet.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace fedshard::control {

enum class RankState {
  expected,  // nothing heard yet
  joined,    // said hello
  training,  // has begun a collective, sent a record or proposed a round
  failed,    // reported an error, fell silent, or never came
  ended,     // said goodbye
};

const char* name_of(RankState state);

// expected -> joined -> training -> ended, and every state but the last two -> failed; joined -> ended is legal too
// (a run without steps).
bool is_legal(RankState from, RankState to);

// Ranks are numbered group by group, as in topology: group 0 has ranks 0 to sizes[0] - 1, and so on.
class Membership {
 public:
  explicit Membership(const std::vector<int>& group_sizes);  // throws UsageError where a size is below 1 or none given

  int ranks() const { return static_cast<int>(states_.size()); }
  int groups() const { return static_cast<int>(first_ranks_.size()); }
  int group_of(int rank) const { return groups_.at(static_cast<std::size_t>(rank)); }
  int first_rank(int group) const { return first_ranks_.at(static_cast<std::size_t>(group)); }
  RankState state(int rank) const { return states_.at(static_cast<std::size_t>(rank)); }
  std::vector<int> in_state(RankState state) const;  // ascending
  bool is_over() const;                              // every rank failed or ended

  void move(int rank, RankState to);  // throws RunError where the move is not legal

 private:
  std::vector<RankState> states_;  // by rank
  std::vector<int> groups_;        // by rank
  std::vector<int> first_ranks_;   // by group
};

// "rank 3 (group 1)"
std::string rank_name(int rank, int group);

// `words` without that rank's name and a colon or blank before them, for messages that have named it already.
std::string_view own_words(int rank, int group, std::string_view words);

// "no rank", "rank 2", "ranks 0, 2, 3", "ranks 0-7": runs of three and more are shortened.
std::string list_ranks(const std::vector<int>& ascending);

}  // namespace fedshard::control
