// `fedshard cost`: what a layout sends, counted before anything runs.
// A surprise: the flags are short forms of `--set`, so that whatever a config may hold is read and checked in one
// place, and a question asked with flags alone has the defaults of a run.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fedshard::forecast {

struct CostArgs {
  std::string config;                 // a config file; empty: the flags say all
  std::vector<std::string> settings;  // overrides "table.key=value"
  std::optional<int> ranks;           // default: the sum of the listed groups, else 1
  std::string model;                  // a preset, or a config.json, or a folder that has one
  std::vector<std::int64_t> units;    // elements of each, instead of a model; then there is no memory to tell
  std::optional<bool> keep_root;      // none: as the program does it; of units true keeps the first alone
  // As the keys of a config have them; lists as "4,2,2".
  std::optional<std::string> groups, shard, every, scheme, compress, accum, batch, seq;
  std::optional<std::string> bytes_gather, bytes_reduce, bytes_aggregate;  // of an element: 2 or 4
  std::optional<bool> reshard, reduce_each_micro_step;
  std::string algorithm = "ring";              // or "recursive"
  int ranks_per_node = 0, nodes_per_cell = 0;  // 0: all in one
  int view_group = 0;  // ranks of the groups that crossings are counted between; 0: the layout's
  bool json = false;
};

// Prints a table, or one JSON object. Returns the exit status; throws base::Error with what to do.
int cost(const CostArgs& args);

}  // namespace fedshard::forecast
