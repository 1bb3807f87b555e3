// The words that ranks and the coordinator exchange: typed structs, each one JSON frame on the wire.
// The surprising part: a frame that can't be read is an expected event (anybody can reach a port), so decode() returns
// nothing for it and never throws.
#pragma once
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fedshard/metrics/records.h"

namespace fedshard::control {

inline constexpr int kProtocolVersion = 1;
inline constexpr std::size_t kMaxFrameBytes = 1 << 20;

// --- from a rank to the coordinator

struct Hello {  // the first word of a rank; answered by Welcome or Abort
  static constexpr const char* kType = "hello";
  int rank = 0;
  int group = 0;
  std::int64_t pid = 0;
  std::string host;
  std::string version;        // of the program; all ranks must run the same
  std::string config_digest;  // of the resolved configuration; all ranks must have the same
};

// Sent by the client's own thread, so it tells of a living process, not of progress; answered by Alive.
struct Heartbeat {
  static constexpr const char* kType = "heartbeat";
  std::int64_t step = 0;
  std::int64_t collective = 0;  // how many collectives this rank has begun in its group
  std::string collective_name;  // the last of them
};

struct Record {  // one line of metrics.jsonl
  static constexpr const char* kType = "record";
  nlohmann::json line;
};

struct Proposal {  // "my group is ready for the exchange of this round"
  static constexpr const char* kType = "proposal";
  std::int64_t round = 0;
  int group = 0;
  std::int64_t tokens = 0;  // of the group, since the last round; the same from all its ranks
  bool wants_stop = false;
  std::int64_t steps = 0;  // of the group, since the last round; likewise
};

struct Ready {  // "I hold the whole result of the exchange and have changed nothing yet"
  static constexpr const char* kType = "ready";
  std::int64_t round = 0;
  std::int64_t epoch = 0;
};

// What the record of a round says beyond what the coordinator knows itself.
struct RoundMeasures {
  std::int64_t step = 0;        // updates done; the first participant's first rank is believed, for the weights too
  std::vector<double> weights;  // by participant, as used
  std::vector<int> left_out;    // participants that were kept from the average
  double seconds = 0;           // from the proposal to the new parameters; the record holds the largest of all ranks
  double exposed_seconds = 0;   // of them, those in which the rank could not compute; likewise
  double drift_square = 0;      // this rank's part of the squared norm of (its group's parameters - the mean)
  int fragment = 0;             // of the model
  // This rank's part of sums over its group's model, not numbers where no anchor is kept: the squared norm of its
  // change since the anchor, its product with the mean change, the squared norm of that.
  double change_square = 0, change_with_mean = 0, mean_change_square = 0;
  metrics::TrafficRecord traffic = {};  // of this rank until now; its step and time are not sent
};

struct Digest {
  static constexpr const char* kType = "digest";
  std::int64_t round = 0;
  int group = 0;
  std::uint64_t sum = 0;  // this rank's partial sum modulo 2^64
  RoundMeasures measures;
};

struct RankError {  // "I fail, and this is why"; rank and group are -1 where no single rank is at fault
  static constexpr const char* kType = "error";
  int rank = -1;
  int group = -1;
  std::string message;
  int status = 1;  // the exit status that goes with it
};

struct Goodbye {  // the last word of a rank that has nothing more to say
  static constexpr const char* kType = "goodbye";
  int status = 0;
};

// --- from the coordinator to ranks

struct Welcome {
  static constexpr const char* kType = "welcome";
};

struct Alive {  // so that a rank that waits for an answer knows that somebody is there to give it
  static constexpr const char* kType = "alive";
};

struct RoundPlan {  // all have proposed: exchange with these
  static constexpr const char* kType = "round_plan";
  std::int64_t round = 0;
  std::int64_t epoch = 0;            // counts the attempts at exchanges with new communicators
  std::vector<int> participants;     // group ids, ascending
  std::vector<std::int64_t> tokens;  // by participant, since the last round
  bool stop = false;                 // some rank wants to stop: end after this round
  std::vector<std::int64_t> steps;   // by participant, since the last round
};

struct Commit {  // all are ready: change the parameters
  static constexpr const char* kType = "commit";
  std::int64_t round = 0;
  std::int64_t epoch = 0;
  std::vector<int> participants;
};

struct DigestResult {  // all groups hold the same parameters; where they do not, an Abort comes instead
  static constexpr const char* kType = "digest_result";
  std::int64_t round = 0;
  std::uint64_t digest = 0;  // the sum over a group's ranks modulo 2^64
};

struct Abort {  // leave now
  static constexpr const char* kType = "abort";
  std::string reason;
  int status = 4;  // with this exit status
};

using Message = std::variant<Hello, Heartbeat, Record, Proposal, Ready, Digest, RankError, Goodbye, Welcome, Alive,
                             RoundPlan, Commit, DigestResult, Abort>;

// One frame. Throws RunError where it would be longer than kMaxFrameBytes. Text that is not UTF-8 is sent with
// replacement characters; numbers that are not finite become null and come back as NaN where a number is due.
std::string encode(const Message& message);

// Nothing, with the reason in `why`, where the frame is too long, not JSON, of another protocol version, of an unknown
// type, nested too deeply, or misses a field or has one of a wrong type or out of range.
std::optional<Message> decode(std::string_view frame, std::string& why);

}  // namespace fedshard::control
