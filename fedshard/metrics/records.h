// The records of metrics.jsonl: one struct a kind, and their JSON, whose fields have the names of the members.
// A surprise: JSON has no NaN. A number that is not finite is written as null and its field named in "nonfinite", so
// that every line parses strictly; read back, such a number is NaN.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace fedshard::metrics {

// In every record, `step` counts the steps done, skipped ones too (up to the last round, those of the group that made
// most in each), and `time_s` the seconds since the run began, at the
// end of what the record describes.

using NumberOrList = std::variant<int, std::vector<int>>;

struct StartRecord {
  std::int64_t step = 0;
  double time_s = 0;
  std::string strategy;
  int world = 0;
  std::vector<int> groups;    // their sizes
  NumberOrList shard = 0;     // shards of a group; a list by group where they differ
  NumberOrList replicas = 0;  // replicas of a group, likewise
  std::int64_t params = 0;
  std::map<std::string, std::int64_t> memory;  // bytes by purpose, of the rank with most
  std::int64_t memory_peak = 0;                // of them, the most at once
  std::map<std::string, std::string> versions;
  bool operator==(const StartRecord&) const = default;
};

struct StepRecord {
  std::int64_t step = 0;  // from 1
  double time_s = 0;
  int group = 0;
  double loss = 0;       // mean over the group's tokens of the step; not finite where the step was skipped
  double grad_norm = 0;  // before clipping
  double lr = 0;
  std::int64_t tokens = 0;  // of the group, since the run began
  double tokens_per_s = 0;  // of the group
  bool operator==(const StepRecord&) const = default;
};

struct RoundRecord {
  std::int64_t step = 0;
  double time_s = 0;
  std::int64_t round = 0;  // from 1
  int fragment = 0;        // of the model
  double seconds = 0;
  double exposed_seconds = 0;       // of them, those in which nothing was computed
  std::vector<int> participants;    // group ids
  std::vector<std::int64_t> steps;  // by participant, since the last round (of the fragment)
  std::vector<double> weights;      // by participant
  std::vector<int> left_out;        // participants whose contribution was not sound: they received the others' average
  std::vector<double> drift;        // by participant: norm of the difference to the mean
  // By participant, empty where no anchor is kept: of its change since the last round (the pseudo-gradient) the norm,
  // and the cosine to the mean one.
  std::vector<double> change_norm, cosine;
  double tokens_per_s = 0;  // of the world
  std::string digest;       // 16 hexadecimal digits
  bool operator==(const RoundRecord&) const = default;
};

enum class EvalModel { mean, group };  // the groups' weighted mean, or the model of one group

struct EvalRecord {
  std::int64_t step = 0;
  double time_s = 0;
  double loss = 0;
  double perplexity = 0;
  std::int64_t tokens = 0;
  EvalModel model = EvalModel::mean;
  std::optional<int> group;  // with EvalModel::group
  bool operator==(const EvalRecord&) const = default;
};

// Payload bytes handed to point-to-point sends over all ranks since the run began.
struct TrafficRecord {
  std::int64_t step = 0;
  double time_s = 0;
  std::int64_t intra_group = 0;
  std::int64_t inter_group = 0;
  std::int64_t gather = 0;  // from here by purpose
  std::int64_t reduce = 0;
  std::int64_t replica = 0;
  std::int64_t aggregate = 0;
  std::int64_t state = 0;
  std::int64_t control = 0;
  TrafficRecord& operator+=(const TrafficRecord& other);  // of bytes
  bool operator==(const TrafficRecord&) const = default;
};

struct EndRecord {
  std::int64_t step = 0;
  double time_s = 0;
  std::int64_t steps = 0;
  std::int64_t tokens = 0;
  std::int64_t skipped = 0;  // of the steps, those that some group has skipped, added over groups
  double seconds = 0;        // of training, without validation
  double tokens_per_s = 0;
  std::int64_t peak_rss_bytes = 0;     // of the rank with most
  std::int64_t peak_tensor_bytes = 0;  // of the rank with most: what `memory_peak` foretells
  bool operator==(const EndRecord&) const = default;
};

using Record = std::variant<StartRecord, StepRecord, RoundRecord, EvalRecord, TrafficRecord, EndRecord>;

// One flat object with "kind" ("start", "step", ...); passes through finite().
nlohmann::json to_json(const Record& record);

// Throws RunError naming the kind and the field, where a field is missing or of another type. Ignores unknown fields.
Record record_from_json(const nlohmann::json& line);

// `line` (an object) with every number that is not finite, also inside lists and objects, replaced by null, and the
// names of the fields concerned added to its list "nonfinite". Without such numbers, `line` as it was.
nlohmann::json finite(nlohmann::json line);

}  // namespace fedshard::metrics
