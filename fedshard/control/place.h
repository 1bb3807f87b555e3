// Where a process stands in the world, read from the environment that torchrun, srun or mpirun gave it.
// The surprising part: Slurm's variables outrank Open MPI's, except where both are there with different sizes: then
// mpirun runs inside the allocation and Slurm's tasks are mpirun's daemons, not ranks.
#pragma once
#include <functional>
#include <optional>
#include <string>

namespace fedshard::control {

struct Place {
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank;  // among the ranks of this node; empty where the launcher does not say
  std::optional<int> local_size;  // ranks on this node; empty where the launcher does not say
  std::string master_address;     // where the c10d store listens
  int master_port = 0;
  std::string source;       // who said so: "fedshard", "torchrun", "Slurm", "Open MPI" or "PMI"
  std::string coordinator;  // endpoint and token of a coordinator that runs already; both empty under a launcher that
  std::string run_token;    // is not ours: rank 0's process hosts it there
};

using Environment = std::function<std::optional<std::string>(const std::string& name)>;

// The real environment; a variable that is set to nothing counts as absent.
std::optional<std::string> process_environment(const std::string& name);

// The place that the environment states, or nothing where no launcher has started this process (a login shell, the
// shell of sbatch or salloc). Order: torchrun's variables (our own launcher sets them too), Slurm's, Open MPI's, PMI's.
// MASTER_ADDR and MASTER_PORT win over what is derived. Derived: the address is the first host of the step's node list
// under Slurm and 127.0.0.1 where all ranks are on one node; the port follows from the job's id.
// Throws UsageError, naming the variable, where variables are half set, not numbers, out of range, or contradict.
std::optional<Place> place_from_environment(const Environment& environment);

// "rank 3 of 8, local rank 1 of 4, store at node1:29500 (from Slurm's variables)"
std::string describe(const Place& place);

}  // namespace fedshard::control
