// What one process of a run does for all of them: it hosts the coordinator, writes metrics.jsonl and shows the
// progress. The launcher does it where we started the ranks ourselves, so that a dying rank loses no record; under
// torchrun, srun or mpirun rank 0's process does.
#pragma once
#include <memory>
#include <string>

#include "fedshard/config/config.h"
#include "fedshard/control/coordinator.h"
#include "fedshard/metrics/run_folder.h"

namespace fedshard::train {

// Seconds: a process that says nothing for as long as a collective may take is as lost as one that doesn't answer in
// it. Not less than a few heartbeats, though.
double silence_s(const config::Config& config);

class RunHost {
 public:
  // Makes the run folder and starts the coordinator on `bind_address` (a number or an interface's name). Throws
  // UsageError where the folder holds another run's records or the address can't be bound.
  RunHost(const config::Config& config, const topology::Layout& layout, const std::string& bind_address);
  ~RunHost();

  const std::string& endpoint() const;
  const std::string& run_token() const { return run_token_; }
  const metrics::RunFolder& folder() const { return folder_; }
  control::CoordinatorStatus status() const;

  // Waits for the ranks' last words, then stops the coordinator and completes the files and the display.
  void finish(double patience_s);

 private:
  class Records;
  metrics::RunFolder folder_;
  std::string run_token_;
  std::unique_ptr<Records> records_;
  std::unique_ptr<control::Coordinator> coordinator_;
};

}  // namespace fedshard::train
