// `fedshard train CONFIG`: as the launcher of local ranks, or as one rank under torchrun, srun or mpirun.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace fedshard::cli {

struct TrainArgs {
  std::string config;
  std::optional<int> ranks;            // start so many here, whatever the environment says
  std::optional<int> virtual_groups;   // so many groups, a rank of each in every process
  std::vector<std::string> overrides;  // table.key=value
  bool dry_run = false;                // print what would run; start nothing
};

// Returns the exit status; throws base::Error for what goes wrong before ranks start.
int train(const TrainArgs& args);

}  // namespace fedshard::cli
