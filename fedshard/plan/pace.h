// How long a round is: a number of steps, of tokens, or of seconds.
//
// A surprise: groups need not make the same number of steps in a round. Then all go on from the step of the group that
// made most, so that the learning rate and the end of the run are everybody's, and the others have made fewer updates
// than their step says. (Rounds by time let each worker step until a common boundary: A-EDiT, arXiv 2412.07210.)
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fedshard::plan {

struct Pace {
  enum class By {
    steps,        // `count` of every group
    group_steps,  // by_group[g] of group g
    tokens,       // the steps until a group has trained on at least `count` since the last round
    seconds,      // the steps until `seconds` have passed since the last round
  };
  By by = By::steps;
  std::int64_t count = 8;  // at least 1
  std::vector<std::int64_t> by_group = {};
  double seconds = 0;

  static Pace of_steps(std::int64_t steps) { return {.count = steps}; }
  // All groups make the same number of steps, whatever happens.
  bool is_even() const;
  bool operator==(const Pace&) const = default;
};

// "30s", "1.5m", "1h", "250000 tokens", "0.5M tokens" (k, M, G), blanks between number and unit or not. Throws
// UsageError, without naming a key, for anything else, for no tokens or a part of one, and for no time or more than a
// week.
Pace parse_pace(std::string_view text);

// "8", "[8, 4]", "250000 tokens", "30s", as parse_pace reads the last two.
std::string describe(const Pace& pace);

// Throws UsageError, without naming a table, unless a list has one number of steps for each of the groups and, where
// groups get out of step, `steps` (those of the run after its warm-up) ends a list's last round, and nothing (delay,
// fragments) counts on steps that all groups share.
void check_pace(const Pace& pace, int groups, std::int64_t steps, std::int64_t delay, std::int64_t fragments);

// The most steps that a group makes in a round; 1, the least, where tokens or seconds set the pace.
std::int64_t most_steps(const Pace& pace);

// What a group has done since the last round.
struct SinceRound {
  std::int64_t steps = 0;
  std::int64_t tokens = 0;
  double seconds = 0;
};

// Whether that is the group's part of a round. Never before a step.
bool round_is_over(const Pace& pace, int group, const SinceRound& since);

}  // namespace fedshard::plan
