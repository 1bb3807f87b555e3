// A rank's line to the coordinator. Its own thread sends heartbeats and receives, so training never waits for it
// except where a round has to be agreed.
// The surprising part: an abort can end the process from that thread. A rank that waits in a collective for a dead peer
// can't be woken, so `exit_on_abort` leaves by _exit after a grace.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "fedshard/control/messages.h"
#include "fedshard/control/run_token.h"

namespace fedshard::control {

struct ClientOptions {
  std::string endpoint;
  RunToken token;
  int rank = 0;
  int group = 0;
  std::string version{};        // of the program
  std::string config_digest{};  // of the resolved configuration
  // Seconds of real time.
  double join_s = 120;    // for the coordinator's welcome
  double answer_s = 660;  // for each answer in a round; longer than the coordinator's own deadline, which names ranks
  double heartbeat_s = 1;
  // Without a word from the coordinator, in heartbeats that it has not answered, before it counts as lost: a process
  // that was stopped for a while finds its answers when it goes on.
  double silence_s = 30;
  // On the client's thread, once. Must return soon, not throw, and not close the client.
  std::function<void(const Abort&)> on_abort{};
  // With a value: so many seconds after an abort the process prints the reason on standard error and leaves by _exit
  // with the abort's status, unless the client has been closed by then.
  std::optional<double> exit_on_abort_s{};
};

// All methods are safe from any thread, but only one thread at a time may wait for an answer. Methods that wait throw
// PeersLostError past the deadline; after an abort they throw the error that goes with its status (PeersLostError for
// lost peers, RunError where the groups differ, UsageError where the configurations do).
class CoordinatorClient {
 public:
  // Says hello and waits for the welcome. Throws as the waiting methods do: PeersLostError where nobody answers at the
  // endpoint (or holds another server key), UsageError where the coordinator refuses this rank's key.
  explicit CoordinatorClient(ClientOptions options);
  ~CoordinatorClient();  // sends what is queued (at most a second), but says no goodbye
  CoordinatorClient(const CoordinatorClient&) = delete;
  CoordinatorClient& operator=(const CoordinatorClient&) = delete;

  // Where this rank is: the next heartbeat carries it. Cheap enough for every collective.
  void set_step(std::int64_t step);
  void begin_collective(std::string_view name);  // counts them from 1
  std::int64_t collectives() const;

  void record(
      nlohmann::json line);  // queues one line of metrics.jsonl: an object with `kind`; throws RunError otherwise

  // The three words of a round, each waits until all ranks have said the same.
  RoundPlan propose(std::int64_t round, std::int64_t steps, std::int64_t tokens, bool wants_stop);
  Commit ready(std::int64_t round, std::int64_t epoch);
  DigestResult digest(std::int64_t round, std::uint64_t sum, const RoundMeasures& measures);

  // Last words: they flush everything queued and close the line, within about a second even where nobody listens.
  // Nothing can be sent afterwards (RunError); closing twice is fine and does nothing.
  void report_error(const std::string& message, int status);
  void goodbye(int status);

  std::optional<Abort> aborted() const;
  void throw_if_aborted() const;

 private:
  class Line;
  std::unique_ptr<Line> line_;
};

}  // namespace fedshard::control
