// The training loop of one rank: read this first. trainer.cpp tells the algorithm; everything it calls has a room of
// its own.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "fedshard/base/clock.h"
#include "fedshard/base/error.h"
#include "fedshard/comm/axes.h"
#include "fedshard/config/config.h"
#include "fedshard/control/client.h"
#include "fedshard/federation/round.h"
#include "fedshard/metrics/records.h"
#include "fedshard/metrics/trace.h"
#include "fedshard/nn/unit_module.h"
#include "fedshard/optim/lr_schedule.h"
#include "fedshard/optim/optimizer.h"
#include "fedshard/plan/rounds.h"
#include "fedshard/shard/engine.h"
#include "fedshard/train/inputs.h"
#include "fedshard/train/turns.h"

namespace fedshard::train {

// What a rank stands on. The references must outlive the trainer.
struct RankContext {
  const config::Config& config;
  const topology::Layout& layout;
  int rank = 0;
  const Inputs& inputs;
  comm::Axes& axes;
  const comm::TrafficCounter& traffic;
  // What rounds talk over, and its counter: the same two, or where rounds have a delay others.
  comm::Axes& round_axes;
  const comm::TrafficCounter& round_traffic;
  control::CoordinatorClient& coordinator;
  metrics::Trace* trace = nullptr;  // null: none wanted
  at::Device device = at::kCPU;     // that computes
  Turns* turns = nullptr;           // of the groups that share this process; null: it has one rank
};

class Trainer {
 public:
  explicit Trainer(const RankContext& context);
  ~Trainer();

  // Trains to the last step or to the time limit. Returns ok or stopped; throws what ends the run otherwise.
  base::ExitStatus run();

 private:
  // What holds activations and waits for this group alone.
  void in_turn(const std::function<void()>& work) {
    context_.turns == nullptr ? work() : context_.turns->run(at_.group, work);
  }
  void train_step();
  bool is_synchronous(std::int64_t step) const;  // steps are counted from 1
  void count(const shard::StepResult& result);
  void run_rounds();
  bool round_is_over();  // of uneven ones; as the ranks of the group have agreed
  void mark_round();
  // Uneven rounds: right after one, and in the warm-up.
  bool groups_are_in_step() const { return !uneven_ || step_ == marks_.front().step; }
  void begin_round(int fragment);
  void finish_round();
  bool validation_is_due() const;
  void validate();
  bool past_time_limit() const;  // by this rank's clock
  bool time_is_up();             // as all ranks that step together have agreed

  void load_weights();
  std::vector<nn::MicroBatch> next_batches();
  void trace_operations();
  void record_start();
  void record_step(const shard::StepResult& result, double lr);
  comm::Traffic traffic() const;  // of this rank
  void record_traffic();
  void record_end();
  void send(const metrics::Record& record) { context_.coordinator.record(metrics::to_json(record)); }
  bool speaks_for_group() const { return context_.axes.group->index() == 0; }

  RankContext context_;
  topology::Coordinates at_;
  base::SteadyClock clock_;
  double started_s_;
  nn::Model model_;
  shard::StateRegistry registry_;
  shard::Engine engine_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  optim::LrSchedule lr_schedule_;
  plan::RoundOptions rounds_;
  bool uneven_;  // groups may make unlike numbers of steps in a round
  federation::Federation federation_;
  data::Loader loader_;

  std::int64_t step_ = 0;       // steps done; up to the last round those of the group that made most in each
  std::int64_t own_steps_ = 0;  // by this group
  std::int64_t updates_ = 0;    // of the optimizer, since it began or was reset
  std::int64_t skipped_ = 0;    // steps
  int skipped_in_row_ = 0;
  std::int64_t round_ = 0;   // rounds begun
  std::int64_t tokens_ = 0;  // of this group, since the run began
  struct Mark {
    std::int64_t step = 0, tokens = 0;
  };
  std::vector<Mark> marks_;           // by fragment, where its last round left this group
  double marked_s_ = started_s_;      // when the last round ended
  std::int64_t validated_step_ = -1;  // the step after which the last validation ran
  bool stop_ = false;                 // at the time limit; all ranks of the group (with several: of the world) agree

  double validation_s_ = 0;  // spent on validation, which is no training
  double last_record_s_ = started_s_;
  std::int64_t last_record_tokens_ = 0;
};

}  // namespace fedshard::train
