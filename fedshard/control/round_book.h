// The rounds as the coordinator sees them: who has proposed, who is ready, whose digest has come.
// The surprising part: one digest that differs is not blamed on anybody. With two groups nobody can say which is right.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "fedshard/control/membership.h"
#include "fedshard/control/messages.h"
#include "fedshard/metrics/records.h"

namespace fedshard::control {

// No clock, no sockets: times come in as seconds. Every method that takes a rank's word throws RunError where the word
// contradicts what has been agreed, and returns the answer that is due to all ranks when this was the last word
// missing.
class RoundBook {
 public:
  enum class Phase { between, proposing, exchanging, comparing };

  explicit RoundBook(const Membership& membership);  // which must outlive it
  RoundBook(const RoundBook&) = delete;
  RoundBook& operator=(const RoundBook&) = delete;

  // The first proposal of a run names its first round (a resumed run does not begin with the first one); from there on
  // rounds are consecutive.
  std::optional<RoundPlan> propose(int rank, const Proposal& proposal, double now);
  std::optional<Commit> ready(int rank, const Ready& ready, double now);
  std::optional<DigestResult> digest(int rank, const Digest& digest, double now);

  Phase phase() const { return phase_; }
  std::int64_t round() const { return plan_.round; }
  const char* due() const;  // what the present phase waits for: "propose", "be ready", "send its digest"
  double phase_start() const { return phase_start_; }
  std::vector<int> missing() const;  // ranks whose word the present phase waits for; none between rounds

  // The record of the round that digest() has just completed, without the time and the rate of tokens.
  metrics::RoundRecord record() const;
  metrics::TrafficRecord traffic() const;  // likewise, over all ranks
  std::int64_t tokens() const;             // of all participants, in the present round

 private:
  void arrive(int rank, Phase phase, std::int64_t round);
  bool all_arrived() const;
  void enter(Phase phase, double now);
  std::vector<std::uint64_t> group_digests() const;
  void add_changes(metrics::RoundRecord& record) const;
  void compare(const std::vector<std::uint64_t>& digests) const;

  const Membership& membership_;
  Phase phase_ = Phase::between;
  double phase_start_ = 0;
  bool has_begun_ = false;
  RoundPlan plan_;                                 // of the present or last round
  std::vector<bool> arrived_;                      // by rank
  std::vector<std::optional<Proposal>> proposed_;  // by group
  std::vector<Digest> digests_;                    // by rank
};

}  // namespace fedshard::control
