// A step and a round in seconds: a discrete simulation that interprets the engine's own schedule (plan/schedule.h).
//
// A rank has four resources, each a queue: the host, which issues everything in the schedule's order; the processor;
// the communicator of the shards, whose gathers and reductions run in the order of issue; and that of the replicas. A
// gather starts when its communicator is free and the host has issued it, a computation when its units are there, a
// reduction when its gradient is. The host itself waits where the program's does: for the loss at the end of a forward
// pass, and for all gradients before the first update.
//
// A surprise: one rank stands for its group. What ranks of a group do not share is in the lateness alone: at each
// collective of n ranks and each computation all wait for the latest of n.
#pragma once
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "fedshard/cost/formulas.h"
#include "fedshard/cost/machine.h"
#include "fedshard/model/dims.h"
#include "fedshard/plan/pace.h"

namespace fedshard::cost {

// What is trained, and how.
struct Job {
  plan::ModelPlan plan;
  topology::Layout layout;
  TrafficOptions traffic;
  std::vector<double> stage_flops;  // of each stage's forward, a token
  std::int64_t local_batch_size = 1, seq_len = 1;
  plan::Pace pace = {};
  std::int64_t delay = 0;             // steps that an exchange may take beside training
  std::int64_t fragments = 1;         // a round exchanges them in turn, each on its own
  std::vector<double> slowness = {};  // of each group's computations, 1: as the machine has it; empty: all 1
  std::int64_t rank_step_tokens() const { return local_batch_size * seq_len * traffic.schedule.micro_steps; }
};

// The plan with embedding, last norm and head as one unit, the first, which the first and the last stage share.
// Throws UsageError where parts of these are frozen or group-local.
plan::ModelPlan with_root_unit(plan::ModelPlan plan);

// FLOPs of each stage's forward, a token: 2 for each parameter of its matrices, and 2 T x (heads' width) for the
// attention, whose kernels skip the masked half. (dims.h counts that half, as the definition of MFU has it.)
std::vector<double> stage_flops(const model::Dims& dims, std::int64_t seq_len);

// How late the latest of n ranks is: the mean, or drawn from exponential distributions.
class Noise {
 public:
  Noise() = default;  // the mean
  explicit Noise(std::uint64_t seed) : engine_(seed) {}
  double latest_of(std::int64_t n);  // as a multiple of the mean of one
  bool is_drawn() const { return engine_.has_value(); }

 private:
  std::optional<std::mt19937_64> engine_;
};

enum class Lane { host, compute, shards, replicas };
const char* name_of(Lane lane);
struct Busy {
  Lane lane = Lane::host;
  std::string what;  // "gather model.layers.1"
  double begin = 0, end = 0;
};

// Seconds. What is exposed is the time that the processor stands still for it.
struct StepTime {
  double total = 0;
  double compute = 0;  // of the processor, lateness included; `late` of that is lateness
  double late = 0;
  double gather = 0, reduce = 0, replica = 0, host = 0;  // exposed
  double update = 0, overhead = 0;
};

// A round and its steps; with one group a step alone.
struct RoundTime {
  std::vector<StepTime> steps;       // of each group, on average in this round
  std::vector<std::int64_t> counts;  // steps of each group
  double exchange = 0;               // between groups, hidden or not
  double exposed = 0;                // of that, what training waits for
  double waiting = 0;                // of the group that is ready first, for the last
  double total = 0;                  // seconds of the round
  std::int64_t tokens = 0;           // of all groups
  std::int64_t most_steps() const;
  double seconds_per_step() const { return total / static_cast<double>(most_steps()); }
  double tokens_per_s() const { return static_cast<double>(tokens) / total; }
};

// A job on a machine. Both must outlive it and stay as they are; what every step has in common is made once.
class Simulator {
 public:
  Simulator(const Job& job, const Machine& machine);  // throws what plan::update_rules throws

  // One step of a group. `busy`: what each resource did, where it is wanted.
  StepTime step(int group, Noise& noise, std::vector<Busy>* busy = nullptr) const;

  // Seconds of an exchange, between groups and inside them: of a round, or of one of its fragments. Nothing with one
  // group.
  double exchange(Noise& noise) const;

  RoundTime round(Noise& noise) const;

 private:
  const Job& job_;
  const Machine& machine_;
  plan::Schedule schedule_;
  plan::UpdateRules rules_;
};

}  // namespace fedshard::cost
