#include "fedshard/plan/pace.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

using base::fail;
using base::UsageError;

struct Unit {
  const char* name;
  Pace::By by;
  double factor;
};

constexpr Unit kUnits[] = {{"s", Pace::By::seconds, 1},         {"m", Pace::By::seconds, 60},
                           {"h", Pace::By::seconds, 3600},      {"tokens", Pace::By::tokens, 1},
                           {"k tokens", Pace::By::tokens, 1e3}, {"M tokens", Pace::By::tokens, 1e6},
                           {"G tokens", Pace::By::tokens, 1e9}};
constexpr double kMostSeconds = 604800;
constexpr double kMostTokens = 1e15;  // every whole number below is a double

}  // namespace

bool Pace::is_even() const {
  if (by == By::group_steps)
    return std::adjacent_find(by_group.begin(), by_group.end(), std::not_equal_to{}) == by_group.end();
  return by == By::steps;
}

Pace parse_pace(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view name(end, text.data() + text.size());
  name.remove_prefix(std::min(name.find_first_not_of(' '), name.size()));
  const auto* unit = std::find_if(std::begin(kUnits), std::end(kUnits), [&](const Unit& u) { return name == u.name; });
  if (error != std::errc{} || unit == std::end(kUnits)) {
    fail<UsageError>(
        "'{}' is no length of a round: write seconds (\"30s\"; also m, h) or tokens (\"250000 tokens\"; "
        "also k, M, G), or a number of steps without quotes",
        text);
  }
  const double amount = number * unit->factor;
  if (unit->by == Pace::By::seconds) {
    if (!(amount > 0 && amount <= kMostSeconds)) {
      fail<UsageError>("'{}': a round takes more than 0 seconds and at most a week", text);
    }
    return {.by = Pace::By::seconds, .seconds = amount};
  }
  const double whole = std::round(amount);
  if (!(whole >= 1 && whole <= kMostTokens && std::abs(amount - whole) <= 1e-12 * whole)) {
    fail<UsageError>("'{}': a round has a whole number of tokens, from 1 to {:.0f}", text, kMostTokens);
  }
  return {.by = Pace::By::tokens, .count = static_cast<std::int64_t>(whole)};
}

std::string describe(const Pace& pace) {
  switch (pace.by) {
    case Pace::By::steps:
      return fmt::format("{}", pace.count);
    case Pace::By::group_steps:
      return fmt::format("[{}]", fmt::join(pace.by_group, ", "));
    case Pace::By::tokens:
      return fmt::format("{} tokens", pace.count);
    case Pace::By::seconds:
      return fmt::format("{}s", pace.seconds);
  }
  return "?";
}

void check_pace(const Pace& pace, int groups, std::int64_t steps, std::int64_t delay, std::int64_t fragments) {
  if (pace.by == Pace::By::group_steps && std::ssize(pace.by_group) != groups) {
    fail<UsageError>("every has {} numbers, but the number of groups is {}; give one for each, or one without brackets",
                     pace.by_group.size(), groups);
  }
  if (pace.is_even()) return;
  if (delay > 0 || fragments > 1) {
    fail<UsageError>(
        "every = {} lets groups make unlike numbers of steps in a round, but {} = {} counts on steps that "
        "all groups share: set {} = {}, or every to one number of steps",
        describe(pace), delay > 0 ? "delay" : "fragments", delay > 0 ? delay : fragments,
        delay > 0 ? "delay" : "fragments", delay > 0 ? 0 : 1);
  }
  if (groups > 1 && pace.by == Pace::By::group_steps && steps % most_steps(pace) != 0) {
    fail<UsageError>(
        "every = {}: the {} steps after the warm-up (all, without start_step) must be a multiple of {}, the "
        "most that a group makes in a round, so that the run ends with a round",
        describe(pace), steps, most_steps(pace));
  }
}

std::int64_t most_steps(const Pace& pace) {
  if (pace.by == Pace::By::group_steps) return *std::max_element(pace.by_group.begin(), pace.by_group.end());
  return pace.by == Pace::By::steps ? pace.count : 1;
}

bool round_is_over(const Pace& pace, int group, const SinceRound& since) {
  if (since.steps < 1) return false;
  switch (pace.by) {
    case Pace::By::steps:
      return since.steps >= pace.count;
    case Pace::By::group_steps:
      return since.steps >= pace.by_group.at(static_cast<std::size_t>(group));
    case Pace::By::tokens:
      return since.tokens >= pace.count;
    case Pace::By::seconds:
      return since.seconds >= pace.seconds;
  }
  return true;
}

}  // namespace fedshard::plan
