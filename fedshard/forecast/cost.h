// `fedshard cost`: what a layout sends, counted before anything runs.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fedshard/forecast/question.h"

namespace fedshard::forecast {

struct CostArgs {
  Question question;
  std::optional<int> ranks;                    // default: the sum of the listed groups
  std::vector<std::int64_t> units;             // elements of each, instead of a model; then there is no memory to tell
  std::optional<bool> keep_root;               // none: as the program does it; of units true keeps the first alone
  std::string algorithm = "ring";              // or "recursive"
  int ranks_per_node = 0, nodes_per_cell = 0;  // 0: all in one
  int view_group = 0;  // ranks of the groups that crossings are counted between; 0: the layout's
  bool json = false;
};

// Prints a table, or one JSON object. Returns the exit status; throws base::Error with what to do.
int cost(const CostArgs& args);

}  // namespace fedshard::forecast
