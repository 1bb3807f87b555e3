// What the coordinator knows and decides, without sockets, threads or a clock: words of ranks and the time go in,
// answers and records come out.
// The surprising part: a rank that reports lost peers (status 4) is not believed at once. It is most likely the echo of
// a rank that died without a word, so the coordinator listens a moment longer for the cause.
#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fedshard/control/membership.h"
#include "fedshard/control/messages.h"
#include "fedshard/control/round_book.h"

namespace fedshard::control {

// All in seconds.
struct Deadlines {
  double join = 120;    // from the start until every rank has said hello
  double silence = 30;  // without a word from a rank, before it counts as lost
  double round = 600;   // for each phase of a round: from its first word to its last
  double echo = 2.5;    // between a report of lost peers and the verdict; at least two heartbeats
};

struct CoordinatorStatus {
  std::optional<RankError> first_error;     // the cause of the run's end, as far as known
  double first_error_s = 0;                 // seconds since the start
  bool aborted = false;                     // all ranks have been told to leave
  std::vector<int> joined, ended, failed;   // ranks that have joined (and are neither ended nor failed), and so on
  std::vector<nlohmann::json> latest_step;  // by group; null before the group's first
  std::int64_t rounds = 0;                  // completed
  std::int64_t rejected_frames = 0;         // malformed, or of a rank that may not speak
  std::string last_rejection;
  std::int64_t refused_clients = 0;  // connections with a wrong run token
};

class CoordinatorState {
 public:
  CoordinatorState(const std::vector<int>& group_sizes, const Deadlines& deadlines, double now);
  CoordinatorState(const CoordinatorState&) = delete;
  CoordinatorState& operator=(const CoordinatorState&) = delete;

  void receive(int rank, const Message& message, double now);  // `rank` by the connection's name
  void reject(const std::string& why);
  void refuse_client() { ++status_.refused_clients; }
  void tick(double now);  // judges the deadlines; call when everything received has been handed in
  // Something on the coordinator's own side went wrong: ends the run with status 1.
  void fail_locally(const std::string& message, double now);

  std::vector<std::pair<int, Message>> take_outgoing() { return std::exchange(outgoing_, {}); }
  std::vector<nlohmann::json> take_records() { return std::exchange(records_, {}); }
  CoordinatorStatus status() const;
  bool is_over() const { return membership_.is_over(); }

 private:
  void on(int rank, const Hello& hello, double now);
  void on(int rank, const Heartbeat& heartbeat, double now);
  void on(int rank, const Record& record, double now);
  void on(int rank, const Proposal& proposal, double now);
  void on(int rank, const Ready& ready, double now);
  void on(int rank, const Digest& digest, double now);
  void on(int rank, const RankError& error, double now);
  void on(int rank, const Goodbye& goodbye, double now);
  template <class FromCoordinator>
  void on(int rank, const FromCoordinator&, double) {
    reject(fmt::format("{} sent a {}, which only the coordinator may", who(rank), FromCoordinator::kType));
  }

  std::string who(int rank) const { return rank_name(rank, membership_.group_of(rank)); }
  bool is_present(int rank) const;
  void begins_training(int rank, double now);
  void send_to_present(const Message& message);
  void complete_round(const DigestResult& result, double now);
  void end_run(const RankError& cause, const std::string& reason, int status, double now);
  void judge_echo(double now);
  void judge_silence(double now);
  std::string whereabouts(int group) const;

  struct Echo {
    RankError report;
    double time;
  };

  Deadlines deadlines_;
  double start_;
  Membership membership_;
  RoundBook rounds_{membership_};
  std::vector<double> last_heard_;    // by rank
  std::vector<Heartbeat> positions_;  // by rank
  std::optional<Hello> first_hello_;  // what the others must agree with
  std::optional<Echo> echo_;
  std::optional<Abort> abort_;
  double tokens_counted_from_ = -1;  // the end of the last round, or the first sign of training
  CoordinatorStatus status_;
  std::vector<std::pair<int, Message>> outgoing_;
  std::vector<nlohmann::json> records_;
};

}  // namespace fedshard::control
