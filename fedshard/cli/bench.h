// `fedshard bench aggregate`: as the launcher of local ranks, or as one rank under torchrun, srun or mpirun.
// A surprise: the launcher checks what it is told, then hands the words on; each rank reads them again.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fedshard::cli {

struct BenchAggregateArgs {
  std::optional<int> ranks;  // start so many here, whatever the environment says; 4 where that says nothing
  std::vector<int> groups = {2};
  std::vector<int> shard = {1};  // one for all groups, or one each
  std::string model = "llama-tiny";
  std::vector<std::int64_t> units;  // elements of each; instead of a model
  std::vector<std::string> schemes = {"split", "leader", "naive"};
  std::vector<std::string> buckets = {"whole", "unit", "1MiB"};
  std::vector<int> concurrency = {1, 3};
  std::vector<std::string> dtypes = {"fp32", "bf16"};
  int repeat = 5;
  std::string csv;  // a file for the table; empty: none
};

// Returns the exit status; throws base::Error for what goes wrong before ranks start.
int bench_aggregate(const BenchAggregateArgs& args);

}  // namespace fedshard::cli
