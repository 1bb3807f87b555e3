#include "fedshard/cost/simulate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/cost/timing.h"

namespace fedshard::cost {
namespace {

using plan::Op;
using plan::OpKind;

// Seconds of each operation of a group.
class Durations {
 public:
  Durations(const Job& job, const plan::UpdateRules& rules, const Machine& machine, int group, Noise& noise)
      : job_(job), rules_(rules), machine_(machine), noise_(noise), shape_(job.layout.group(group)) {
    const int first = shape_.first_rank;
    shard_path_ = path_of(job.layout.shard_peers(first), machine.placement);
    replica_path_ = path_of(job.layout.replica_peers(first), machine.placement);
    slowness_ = job.slowness.empty() ? 1 : job.slowness[static_cast<std::size_t>(group)];
  }

  int replicas() const { return shape_.replicas; }
  int shards() const { return shape_.shards; }
  bool meets_in_network() const { return shard_path_.nodes > 1 && replica_path_.nodes > 1; }

  // The time without lateness, and with it.
  std::pair<double, double> computation(const Op& op) const {
    const double passes = op.kind == OpKind::backward ? 2 : 1;
    const double tokens = static_cast<double>(job_.local_batch_size * job_.seq_len);
    const double alone = computing(passes * job_.stage_flops[static_cast<std::size_t>(op.stage)] * tokens);
    return {alone, alone * (1 + machine_[Key::spread] * lateness_of_step_)};
  }
  double gather(int unit) const { return over_shards(unit, job_.traffic.bytes_gather); }
  double reduce(int unit) const { return over_shards(unit, job_.traffic.bytes_reduce); }
  double replica(int unit) const {
    const double bytes = static_cast<double>(shard_numel(unit) * job_.traffic.bytes_reduce);
    return ring(replica_path_, 2, bytes / shape_.replicas, shape_.shards);
  }
  double update(int unit) const {
    const double bytes = static_cast<double>(shard_numel(unit)) * machine_[Key::update_bytes];
    return bytes / machine_[Key::memory_bandwidth] * slowness_;
  }
  // Of Muon's update: the gather of a unit's matrices in fp32, and what the rank computes that holds a part of most.
  bool needs_whole(int unit) const {
    const auto& rules = rules_[static_cast<std::size_t>(unit)];
    return std::any_of(rules.begin(), rules.end(), [](const auto& r) { return r.update == plan::Update::muon; });
  }
  double whole_gather(int unit) const { return over_shards(unit, sizeof(float)); }
  double orthogonalisation(int unit) const {
    const std::int64_t shard = shard_numel(unit);
    double most = 0;
    for (std::int64_t begin = 0; begin < shard * shape_.shards; begin += shard) {
      most = std::max(most, newton_schulz_flops(unit, begin, begin + shard));
    }
    return computing(most);
  }
  double call(int ranks) const { return machine_[Key::call] + machine_[Key::call_per_rank] * (ranks - 1); }

 private:
  double computing(double flops) const {
    return flops / (machine_[Key::peak_flops] * machine_[Key::efficiency]) * slowness_;
  }
  // Of the matrices that have a part in [begin, end) of the unit, which a rank orthogonalises whole (optim/muon.cpp).
  double newton_schulz_flops(int unit, std::int64_t begin, std::int64_t end) const {
    constexpr double kSteps = 5;
    const plan::UnitSpec& spec = job_.plan.units[static_cast<std::size_t>(unit)];
    double flops = 0;
    for (int p = 0; p < static_cast<int>(spec.parameters.size()); ++p) {
      if (rules_[static_cast<std::size_t>(unit)][static_cast<std::size_t>(p)].update != plan::Update::muon) continue;
      const plan::ParameterSpec& matrix = spec.parameters[static_cast<std::size_t>(p)];
      const std::int64_t offset = spec.offset_of(p);
      if (offset >= end || offset + matrix.numel() <= begin) continue;
      const auto m = static_cast<double>(std::min(matrix.shape[0], matrix.shape[1]));
      // X X^T, its square, and the sum of both with X again.
      flops += kSteps * (4 * m * static_cast<double>(matrix.numel()) + 2 * m * m * m);
    }
    return flops;
  }
  std::int64_t shard_numel(int unit) const {
    return job_.plan.units[static_cast<std::size_t>(unit)].shard_numel(shape_.shards);
  }
  double over_shards(int unit, std::int64_t bytes_of_element) const {
    const double bytes = static_cast<double>(shard_numel(unit) * bytes_of_element);
    return ring(shard_path_, 1, bytes, shape_.replicas);
  }
  double ring(const Path& path, int passes, double part_bytes, int rings) const {
    const auto late = [&](std::int64_t n) { return machine_[Key::jitter] * noise_.latest_of(n); };
    return ring_seconds(path, machine_, passes, part_bytes, rings, late);
  }

  const Job& job_;
  const plan::UpdateRules& rules_;
  const Machine& machine_;
  Noise& noise_;
  topology::GroupShape shape_;
  Path shard_path_, replica_path_;
  double slowness_ = 1;
  double lateness_of_step_ = noise_.latest_of(shape_.ranks);  // a rank that is slow is so for the whole step
};

// The four queues and what waits for what.
class Interpreter {
 public:
  Interpreter(const Job& job, const Machine& machine, Durations times, std::vector<Busy>* busy)
      : job_(job), machine_(machine), times_(std::move(times)), busy_(busy) {
    arrival_.assign(job.plan.units.size(), 0);
    reduced_.assign(job.plan.units.size(), 0);
  }

  StepTime run(const plan::Schedule& schedule) {
    for (const Op& op : schedule) interpret(op);
    wait_for_reductions(latest_reduction_);
    time_.overhead = machine_[Key::step_overhead];
    time_.total = std::max(host_, processor_) + time_.overhead;
    return time_;
  }

 private:
  void interpret(const Op& op) {
    switch (op.kind) {
      case OpKind::gather:
        return gather(op.unit);
      case OpKind::forward:
      case OpKind::recompute:
      case OpKind::backward:
        return compute(op);
      case OpKind::reduce:
        return reduce(op.unit);
      case OpKind::step:
        return update(op.unit);
      case OpKind::release:
        return;
      case OpKind::exchange:
      case OpKind::apply:
        base::require(false, "a step's schedule has no exchange");
    }
  }

  void gather(int unit) {
    issue(times_.shards());
    const double begin = std::max(shards_, host_);
    arrival_[static_cast<std::size_t>(unit)] = shards_ = begin + times_.gather(unit);
    note(Lane::shards, "gather", unit, begin, shards_);
  }

  void compute(const Op& op) {
    const plan::StageSpec& stage = job_.plan.stages[static_cast<std::size_t>(op.stage)];
    double arrived = 0;
    if (op.kind != OpKind::backward || stage.backward_reads_parameters) {
      for (const int unit : stage.units) arrived = std::max(arrived, arrival_[static_cast<std::size_t>(unit)]);
    }
    const double begin = std::max({processor_, host_, arrived});
    // What it waits for last is to blame, from where the other was over.
    time_.host += std::max(0.0, host_ - processor_);
    time_.gather += std::max(0.0, begin - std::max(processor_, host_));
    const auto [alone, with_lateness] = times_.computation(op);
    processor_ = begin + with_lateness;
    time_.compute += with_lateness;
    time_.late += with_lateness - alone;
    if (busy_ != nullptr && with_lateness > 0) {
      busy_->push_back({Lane::compute, std::string(plan::name_of(op.kind)) + " " + stage.name, begin, processor_});
    }
    const bool reads_loss = op.kind == OpKind::forward && op.stage + 1 == std::ssize(job_.plan.stages);
    if (reads_loss || machine_.software.host_computes) host_ = std::max(host_, processor_);
  }

  void reduce(int unit) {
    issue(times_.shards());
    const double begin = std::max({shards_, host_, processor_});
    shards_ = begin + times_.reduce(unit);
    double end = shards_;
    note(Lane::shards, "reduce", unit, begin, shards_);
    if (times_.replicas() > 1) {
      issue(times_.replicas());
      // Where both leave the node by the same cards, they take turns.
      const double from = std::max({replicas_, host_, shards_});
      replicas_ = end = from + times_.replica(unit);
      if (times_.meets_in_network()) shards_ = replicas_;
      note(Lane::replicas, "reduce", unit, from, replicas_);
    }
    reduced_[static_cast<std::size_t>(unit)] = end;
    latest_reduction_ = std::max(latest_reduction_, end);
  }

  void update(int unit) {
    const bool fused = job_.traffic.schedule.fused_backward;
    wait_for_reductions(fused ? reduced_[static_cast<std::size_t>(unit)] : latest_reduction_);
    double seconds = times_.update(unit);
    if (times_.needs_whole(unit)) {
      issue(times_.shards());
      const double from = std::max({shards_, host_, processor_});
      shards_ = from + times_.whole_gather(unit);
      note(Lane::shards, "gather", unit, from, shards_);
      time_.gather += std::max(0.0, shards_ - std::max(processor_, host_));
      time_.host += std::max(0.0, host_ - processor_);
      processor_ = std::max({processor_, host_, shards_});
      seconds += times_.orthogonalisation(unit);
    }
    const double begin = std::max(processor_, host_);
    processor_ = begin + seconds;
    time_.update += seconds;
    note(Lane::compute, "update", unit, begin, processor_);
    if (machine_.software.host_computes) host_ = processor_;
  }

  // The host reads gradients' norm, so it waits too.
  void wait_for_reductions(double until) {
    if (until <= processor_) return;
    const double of_shards = std::clamp(shards_ - processor_, 0.0, until - processor_);
    const bool replicas_last = replicas_ > shards_;
    time_.reduce += replicas_last ? of_shards : until - processor_;
    if (replicas_last) time_.replica += until - processor_ - of_shards;
    processor_ = until;
    host_ = std::max(host_, until);
  }

  void issue(int ranks) {
    const double begin = host_;
    if (ranks > 1) host_ += times_.call(ranks);
    if (busy_ != nullptr && host_ > begin) busy_->push_back({Lane::host, "issue", begin, host_});
  }

  void note(Lane lane, const char* what, int unit, double begin, double end) {
    if (busy_ == nullptr || end <= begin) return;
    busy_->push_back(
        {lane, std::string(what) + " " + job_.plan.units[static_cast<std::size_t>(unit)].name, begin, end});
  }

  const Job& job_;
  const Machine& machine_;
  Durations times_;
  std::vector<Busy>* busy_;
  std::vector<double> arrival_, reduced_;  // of units
  double host_ = 0, processor_ = 0, shards_ = 0, replicas_ = 0, latest_reduction_ = 0;
  StepTime time_;
};

}  // namespace

plan::ModelPlan with_root_unit(plan::ModelPlan plan) {
  const std::vector<int> first = {0};
  const int last = static_cast<int>(plan.units.size()) - 1;
  if (plan.stages.back().units == first) return plan;
  if (plan.stages.front().units != first || plan.stages.back().units.back() != last ||
      plan.stages[plan.stages.size() - 2].units.back() == last || !plan.units.front().places.empty() ||
      !plan.units.back().places.empty()) {
    base::fail<base::UsageError>("frozen or group-local parts of the embedding or the head do not fit one root unit");
  }
  auto& root = plan.units.front().parameters;
  root.insert(root.end(), plan.units.back().parameters.begin(), plan.units.back().parameters.end());
  plan.units.pop_back();
  plan.stages.back().units = {0};
  return plan;
}

std::vector<double> stage_flops(const model::Dims& dims, std::int64_t seq_len) {
  const auto layers = static_cast<double>(dims.num_hidden_layers);
  const double head = 2.0 * static_cast<double>(dims.vocab_size * dims.hidden_size);
  const double attention = 2.0 * static_cast<double>(dims.query_size() * seq_len);
  const double block = (2.0 * static_cast<double>(dims.matmul_parameter_count()) - head) / layers + attention;
  std::vector<double> flops(static_cast<std::size_t>(dims.num_hidden_layers) + 2, block);
  flops.front() = 0;  // looks up
  flops.back() = head;
  return flops;
}

double Noise::latest_of(std::int64_t n) {
  if (!engine_) return harmonic(n);
  // The largest of n such numbers has the distribution (1 - exp(-x))^n.
  const double uniform = std::uniform_real_distribution<double>(0, 1)(*engine_);
  return -std::log1p(-std::pow(uniform, 1.0 / static_cast<double>(n)));
}

const char* name_of(Lane lane) {
  constexpr const char* kNames[] = {"host", "compute", "shards", "replicas"};
  return kNames[static_cast<std::size_t>(lane)];
}

Simulator::Simulator(const Job& job, const Machine& machine)
    : job_(job),
      machine_(machine),
      schedule_(plan::step_schedule(job.plan, job.traffic.schedule)),
      rules_(plan::update_rules(job.plan, job.traffic.updates)) {
  base::require(job.stage_flops.size() == job.plan.stages.size(), "{} stages with the FLOPs of {}",
                job.plan.stages.size(), job.stage_flops.size());
}

StepTime Simulator::step(int group, Noise& noise, std::vector<Busy>* busy) const {
  return Interpreter(job_, machine_, Durations(job_, rules_, machine_, group, noise), busy).run(schedule_);
}

}  // namespace fedshard::cost
