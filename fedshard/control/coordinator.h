// The run's one point of agreement: a thread that ranks talk to over ZeroMQ. It lives in the launcher, or in rank 0's
// process under a launcher that is not ours.
// The surprising part: it never touches the data plane. It only decides (who takes part, commit or not, who failed),
// so a run spends two small round trips a rank and round on it, and nothing a step.
#pragma once
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fedshard/base/clock.h"
#include "fedshard/control/coordinator_state.h"
#include "fedshard/control/run_token.h"

namespace fedshard::control {

struct CoordinatorOptions {
  std::vector<int> group_sizes;
  RunToken token = RunToken::random();
  std::string bind_address = "127.0.0.1";  // a number or an interface's name; ranks connect to it, so not 0.0.0.0
  Deadlines deadlines;
  // Takes each record of metrics.jsonl on the coordinator's thread and in order. Its `time_s` is the coordinator's: the
  // seconds from its start to the record's arrival, on one clock for all ranks. What the sink throws ends the run.
  std::function<void(const nlohmann::json&)> sink;
  const base::Clock* clock = nullptr;  // must outlive the coordinator; null: the steady clock
};

class Coordinator {
 public:
  // Binds a free port and starts the thread. Throws UsageError where the address can't be bound.
  explicit Coordinator(CoordinatorOptions options);
  ~Coordinator();  // as stop()
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  const std::string& endpoint() const;  // "tcp://127.0.0.1:40123"
  CoordinatorStatus status() const;     // a copy; from any thread, before and after stop()

  // Waits until every rank has ended or failed; false where `seconds` of real time pass before.
  bool wait_until_over(double seconds) const;

  // Hands what has already arrived to the sink, flushes answers (at most a second) and ends the thread.
  void stop();

 private:
  class Server;
  std::unique_ptr<Server> server_;
};

}  // namespace fedshard::control
