// The trainer's records and trace. Apart from the algorithm, because none of it changes what is trained.
#include <sys/resource.h>

#include <algorithm>

#include "fedshard/base/error.h"
#include "fedshard/forecast/forecast.h"
#include "fedshard/train/tensor_memory.h"
#include "fedshard/train/trainer.h"
#include "fedshard/train/version.h"

namespace fedshard::train {
namespace {

// Bytes; the kernel counts in KiB.
double peak_rss() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

// A number where it is alike in all groups, otherwise one by group.
metrics::NumberOrList by_group(const topology::Layout& layout, int topology::GroupShape::*member) {
  std::vector<int> values;
  for (const topology::GroupShape& shape : layout.shapes()) values.push_back(shape.*member);
  const bool alike = std::all_of(values.begin(), values.end(), [&](int v) { return v == values.front(); });
  return alike ? metrics::NumberOrList(values.front()) : values;
}

// Each number's largest value over the world.
void maximum(comm::Axes& axes, std::vector<double>& values) {
  for (comm::Communicator* axis : {axes.group.get(), axes.federation.get()}) {
    for (const auto& theirs : axis->collect(values)) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::max(values[i], theirs[i]);
    }
  }
}

}  // namespace

void Trainer::trace_operations() {
  metrics::Trace* trace = context_.trace;
  if (trace == nullptr) return;
  engine_.observe([this, trace](const plan::Op& op, double begin, double end) {
    const bool computes = op.kind == plan::OpKind::forward || op.kind == plan::OpKind::backward;
    trace->add(computes ? "compute" : "engine", plan::describe(model_.plan, op), plan::name_of(op.kind), begin, end);
  });
}

void Trainer::record_start() {
  if (context_.rank != 0) return;
  metrics::StartRecord record;
  record.strategy = context_.layout.strategy();
  record.world = context_.layout.world();
  record.groups = context_.layout.sizes();
  record.shard = by_group(context_.layout, &topology::GroupShape::shards);
  record.replicas = by_group(context_.layout, &topology::GroupShape::replicas);
  record.params = model_.plan.numel();
  const plan::MemoryTable memory = forecast::memory(context_.config, context_.layout);
  for (const plan::MemoryRow& row : memory.rows) record.memory[plan::name_of(row.purpose)] = row.bytes;
  record.memory_peak = memory.peak;
  record.versions = versions();
  send(record);
}

void Trainer::record_step(const shard::StepResult& result, double lr) {
  if (!speaks_for_group()) return;
  const double now = clock_.now();
  if (own_steps_ % context_.config.metrics.interval != 0 && step_ != context_.config.training.steps) return;
  metrics::StepRecord record;
  record.step = step_;
  record.group = at_.group;
  record.loss = result.loss;
  record.grad_norm = result.grad_norm;
  record.lr = lr;
  record.tokens = tokens_;
  record.tokens_per_s = static_cast<double>(tokens_ - last_record_tokens_) / std::max(now - last_record_s_, 1e-9);
  last_record_s_ = now;
  last_record_tokens_ = tokens_;
  send(record);
}

comm::Traffic Trainer::traffic() const {
  comm::Traffic traffic = context_.traffic.read();
  if (rounds_.delay > 0) traffic += context_.round_traffic.read();
  return traffic;
}

void Trainer::record_traffic() {
  comm::Traffic traffic = this->traffic();
  std::vector<double> totals{static_cast<double>(traffic.intra_group), static_cast<double>(traffic.inter_group)};
  for (const std::int64_t bytes : traffic.by_purpose) totals.push_back(static_cast<double>(bytes));
  comm::sum_over_world(context_.axes, totals);
  if (context_.rank != 0) return;
  const auto bytes = [&](std::size_t i) { return static_cast<std::int64_t>(totals[i]); };
  traffic.intra_group = bytes(0);
  traffic.inter_group = bytes(1);
  for (std::size_t p = 0; p < traffic.by_purpose.size(); ++p) traffic.by_purpose[p] = bytes(2 + p);
  metrics::TrafficRecord record = federation::record_of(traffic);
  record.step = step_;
  send(record);
}

void Trainer::record_end() {
  std::vector<double> totals{static_cast<double>(tokens_), static_cast<double>(skipped_)};
  comm::sum_over_groups(context_.axes, totals);
  std::vector<double> most{peak_rss(), clock_.now() - started_s_ - validation_s_,
                           static_cast<double>(peak_tensor_bytes())};
  maximum(context_.axes, most);
  if (context_.rank != 0) return;
  send(metrics::EndRecord{.step = step_,
                          .steps = step_,
                          .tokens = static_cast<std::int64_t>(totals[0]),
                          .skipped = static_cast<std::int64_t>(totals[1]),
                          .seconds = most[1],
                          .tokens_per_s = totals[0] / most[1],
                          .peak_rss_bytes = static_cast<std::int64_t>(most[0]),
                          .peak_tensor_bytes = static_cast<std::int64_t>(most[2])});
}

}  // namespace fedshard::train
