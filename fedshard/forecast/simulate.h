// `fedshard simulate`: how long steps and rounds take on a machine, for strategies, numbers of ranks and profiles.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fedshard/forecast/question.h"

namespace fedshard::forecast {

struct SimulateArgs {
  Question question;
  std::string machine;                  // a machine file, or the name of a builtin one
  std::vector<std::string> profiles;    // of the machine's; "all": each of them; empty: the machine as it is
  std::vector<std::string> constants;   // overrides "name=value"
  std::vector<int> ranks;               // each in turn; empty: the sum of the listed groups
  std::vector<std::string> strategies;  // see strategies.h; empty: the question's own layout
  std::vector<std::string> slow;        // "group:factor", a group whose computations take so much longer
  std::optional<std::uint64_t> seed;    // lateness is drawn and not the mean
  int rounds = 100;                     // so many times
  bool sensitivity = false;             // every constant halved and doubled
  std::string trace;                    // a file for the first case's first group and step, as Chrome reads it
  bool json = false;
};

// Prints a table, or one JSON object. Returns the exit status; throws base::Error with what to do.
int simulate(const SimulateArgs& args);

}  // namespace fedshard::forecast
