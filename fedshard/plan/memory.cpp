#include "fedshard/plan/memory.h"

#include <algorithm>
#include <map>
#include <set>

#include "fedshard/base/error.h"
#include "fedshard/base/quantities.h"
#include "fedshard/plan/reductions.h"
#include "fedshard/topology/ranges.h"

namespace fedshard::plan {
namespace {

constexpr std::int64_t kFp32 = 4;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

enum BufferUse { kGathered, kGradients, kUses };

// shard::BufferPool as bookkeeping: how many bytes are allocated, and what each buffer is or was used for.
class PoolForecast {
 public:
  void register_size(std::int64_t bytes, int unit) { units_[bytes].insert(unit); }

  void take(std::int64_t bytes, BufferUse use) {
    auto& kept = kept_[bytes];
    if (!kept.empty()) {
      bytes_[kept.back()] -= bytes;
      kept.pop_back();
    }
    bytes_[use] += bytes;
    peak_ = std::max(peak_, bytes_[kGathered] + bytes_[kGradients]);
  }

  void give_back(std::int64_t bytes, BufferUse use) {
    if (units_.at(bytes).size() > 1) {
      kept_[bytes].push_back(use);
    } else {
      bytes_[use] -= bytes;
    }
  }

  std::int64_t bytes(BufferUse use) const { return bytes_[use]; }  // now
  std::int64_t peak() const { return peak_; }                      // of both together

 private:
  std::map<std::int64_t, std::set<int>> units_;          // that have a buffer of a size
  std::map<std::int64_t, std::vector<BufferUse>> kept_;  // by size; the use that each was last put to
  std::int64_t bytes_[kUses] = {}, peak_ = 0;
};

// While a ring sums, it receives one chunk of its buffer beside it. Both axes may be at work at once, on two units.
std::int64_t ring_bytes(std::int64_t shard_numel, const MemoryOptions& options) {
  const std::int64_t of_shard = options.shards > 1 ? shard_numel : 0;
  const std::int64_t of_replica = options.replicas > 1 ? ceil_div(shard_numel, options.replicas) : 0;
  return (of_shard + of_replica) * options.reduce_bytes;
}

// What comes and goes in a step.
struct Moment {
  std::int64_t gathered = 0, gradient_buffers = 0, activations = 0, communication = 0;
  std::int64_t sum() const { return gathered + gradient_buffers + activations + communication; }
};

// Does with the pool and the activations what shard::Engine does in a step.
class StepWalk {
 public:
  StepWalk(const ModelPlan& plan, const MemoryOptions& options)
      : plan_(plan),
        options_(options),
        activations_(options.activations),
        live_(options.shared_activation_bytes),
        has_gradients_(plan.units.size(), false),
        reductions_(plan, options.schedule.reduce_each_micro_step) {
    activations_.resize(plan.stages.size());
    for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
      const std::int64_t padded = options.shards * plan.units[u].shard_numel(options.shards);
      sizes_[kGathered].push_back(padded * options.compute_bytes);
      sizes_[kGradients].push_back(padded * options.reduce_bytes);
      pool_.register_size(sizes_[kGathered][u], u);
      if (!plan.units[u].frozen) pool_.register_size(sizes_[kGradients][u], u);
    }
  }

  void run(const Schedule& step) {
    for (const Op& op : step) {
      switch (op.kind) {
        case OpKind::gather:
          pool_.take(sizes_[kGathered][op.unit], kGathered);
          sample(0);
          break;
        case OpKind::release:
          pool_.give_back(sizes_[kGathered][op.unit], kGathered);
          break;
        case OpKind::forward:
          forward(op.stage);
          break;
        case OpKind::recompute:
          sample(activations_[op.stage].kept + activations_[op.stage].forward);
          live_ += activations_[op.stage].kept;
          break;
        case OpKind::backward:
          backward(op.stage);
          break;
        case OpKind::reduce:
          reductions_.begin(op);
          sample(0);
          break;
        case OpKind::step:
          while (options_.schedule.fused_backward ? reductions_.is_reducing(op.unit) : !reductions_.empty()) {
            finish_oldest_reduction();
          }
          break;
        case OpKind::exchange:
        case OpKind::apply:
          break;  // are not part of a step
      }
    }
  }

  // A forward pass alone, after steps. Returns its peak.
  std::int64_t evaluate(const Schedule& pass) {
    evaluates_ = true;
    peak_ = {};
    run(pass);
    return peak_.sum();
  }

  const Moment& peak() const { return peak_; }
  std::int64_t peak_buffers() const { return pool_.peak(); }
  // What is there between steps.
  std::int64_t idle() const { return pool_.bytes(kGathered) + pool_.bytes(kGradients) + live_; }

 private:
  bool keeps_graph(int stage) const { return !evaluates_ && plan::keeps_graph(plan_, options_.schedule, stage); }
  std::int64_t after_forward(int stage) const {
    return keeps_graph(stage) ? activations_[stage].kept : activations_[stage].output;
  }

  void forward(int stage) {
    sample(after_forward(stage) + activations_[stage].forward);
    live_ += after_forward(stage);
    // What has no graph and no backward is gone when the next stage has read it, unless that keeps it for its own.
    if (stage > 0 && (evaluates_ || stage < plan_.first_trained_stage())) live_ -= activations_[stage - 1].output;
  }

  void backward(int stage) {
    for (const int unit : plan_.stages[stage].units) prepare_gradients(unit);
    sample(activations_[stage].backward);
    live_ -= activations_[stage].kept;
    // The output that a recomputed stage, or one that does not train, has kept for this one alone.
    if (stage > 0 && !keeps_graph(stage - 1)) live_ -= activations_[stage - 1].output;
  }

  void sample(std::int64_t working) {
    Moment now{pool_.bytes(kGathered), pool_.bytes(kGradients), live_ + working, 0};
    for (const Reduction& reduction : reductions_.under_way()) {
      const std::int64_t shard_numel = plan_.units[reduction.unit].shard_numel(options_.shards);
      now.communication = std::max(now.communication, ring_bytes(shard_numel, options_));
    }
    if (now.sum() > peak_.sum()) peak_ = now;
  }

  void prepare_gradients(int unit) {
    if (plan_.units[unit].frozen) return;
    while (reductions_.must_finish_before(unit, has_gradients_[unit])) finish_oldest_reduction();
    if (!has_gradients_[unit]) pool_.take(sizes_[kGradients][unit], kGradients);
    has_gradients_[unit] = true;
  }

  void finish_oldest_reduction() {
    const int unit = reductions_.take_oldest().unit;
    pool_.give_back(sizes_[kGradients][unit], kGradients);
    has_gradients_[unit] = false;
  }

  const ModelPlan& plan_;
  const MemoryOptions& options_;
  std::vector<model::StageActivations> activations_;
  std::int64_t live_;                       // activations now
  std::vector<std::int64_t> sizes_[kUses];  // in bytes, by unit
  std::vector<bool> has_gradients_;
  ReductionQueue reductions_;
  PoolForecast pool_;
  Moment peak_;
  bool evaluates_ = false;
};

// What a rank has to do with in a round.
struct RoundParts {
  std::int64_t slice = 0, shard = 0;            // elements, without padding
  std::int64_t owned = 0, largest = 0;          // elements of parts that its group owns, and of the largest part
  std::vector<std::int64_t> messages, encoded;  // by bucket, both ways: their elements, and their encoded bytes
};

RoundParts parts_of(const ModelPlan& plan, const topology::Layout& layout, int rank, const Compression& compression,
                    const topology::ExchangeRules& rules) {
  const std::vector<std::int64_t> unit_numel = plan.exchanged_numel_by_unit();
  const topology::Coordinates at = layout.at(rank);
  RoundParts parts;
  parts.messages.resize(static_cast<std::size_t>(topology::bucket_count(rules.buckets, unit_numel)));
  parts.encoded.resize(parts.messages.size());
  for (const topology::ExchangePart& part : topology::exchange_parts(layout, unit_numel, rank, rules)) {
    const std::int64_t size = part.range.size();
    // One peer's where it is sent away and comes back, in the same place; each peer's where it is summed.
    const std::int64_t messages = part.owner == at.group ? layout.groups() - 1 : 1;
    parts.slice += size;
    parts.largest = std::max(parts.largest, size);
    if (part.owner == at.group) parts.owned += size;
    parts.messages[static_cast<std::size_t>(part.bucket)] += messages * size;
    parts.encoded[static_cast<std::size_t>(part.bucket)] += messages * encoded_bytes(compression, size);
  }
  const int shards = layout.group(at.group).shards;
  for (const std::int64_t numel : unit_numel) parts.shard += topology::shard_range(numel, shards, at.shard).size();
  return parts;
}

// The most that so many buckets, one after another, have together.
std::int64_t most_at_once(const std::vector<std::int64_t>& by_bucket, int concurrency) {
  std::int64_t now = 0, most = 0;
  for (std::size_t b = 0; b < by_bucket.size(); ++b) {
    now += by_bucket[b];
    if (b >= static_cast<std::size_t>(concurrency)) now -= by_bucket[b - static_cast<std::size_t>(concurrency)];
    most = std::max(most, now);
  }
  return most;
}

// The largest of what `of` makes of the parts of a rank of the group.
template <class Of>
std::int64_t most_of(const ModelPlan& plan, const topology::Layout& layout, int group, const Compression& compression,
                     const topology::ExchangeRules& rules, const Of& of) {
  // Of equal groups the last has the largest parts (topology::part_of rounds in favour of the last one), and in it the
  // last replica of shard 0 that brings something: later shards have padding. Where buckets end matters too.
  const int g = layout.equal_groups() ? layout.groups() - 1 : group;
  const topology::GroupShape& shape = layout.group(g);
  if (layout.equal_groups() && rules.buckets.by == topology::Buckets::By::whole) {
    const int replica = rules.scheme == topology::Scheme::leader ? 0 : shape.replicas - 1;
    return of(parts_of(plan, layout, layout.rank_of(g, replica, 0), compression, rules));
  }
  std::int64_t most = 0;
  for (int rank = shape.first_rank; rank < shape.first_rank + shape.ranks; ++rank) {
    most = std::max(most, of(parts_of(plan, layout, rank, compression, rules)));
  }
  return most;
}

constexpr MemoryPurpose kAlwaysThere[] = {MemoryPurpose::parameters, MemoryPurpose::gradients, MemoryPurpose::moments,
                                          MemoryPurpose::update,     MemoryPurpose::staging,   MemoryPurpose::outer,
                                          MemoryPurpose::prox_anchor};

constexpr struct {
  const char* name;
  const char* label;
} kPurposes[] = {
    {"parameters", "parameters"},
    {"gradients", "gradients"},
    {"moments", "optimizer moments"},
    {"gathered", "gathered units"},
    {"gradient_buffers", "gradients under way"},
    {"activations", "activations"},
    {"communication", "communication"},
    {"update", "optimizer's buffers"},
    {"staging", "update's staging"},
    {"exchange", "exchange of a round"},
    {"outer", "outer optimizer"},
    {"prox_anchor", "anchor of FedProx"},
    {"mean", "mean to evaluate"},
};

}  // namespace

const char* name_of(MemoryPurpose purpose) { return kPurposes[static_cast<int>(purpose)].name; }

std::int64_t MemoryTable::bytes(MemoryPurpose purpose) const {
  const auto row = std::find_if(rows.begin(), rows.end(), [&](const MemoryRow& r) { return r.purpose == purpose; });
  base::require(row != rows.end(), "the memory table has no row '{}'", name_of(purpose));
  return row->bytes;
}

std::int64_t MemoryTable::host_total() const {
  std::int64_t sum = 0;
  for (const MemoryRow& row : rows) sum += row.on_host ? row.bytes : 0;
  return sum;
}

std::int64_t exchange_numel(const ModelPlan& plan, const topology::Layout& layout, int group, const RoundKind& round) {
  return most_of(plan, layout, group, {}, round.rules, [&](const RoundParts& parts) {
    const std::int64_t copy = round.delayed ? parts.slice : 0;
    const std::int64_t beside = copy + most_at_once(parts.messages, round.rules.concurrency);
    const std::int64_t taken_over = round.delayed ? 2 * parts.shard : 0;
    const std::int64_t exchanged =
        round.keeps_anchor ? parts.slice + std::max(beside, parts.shard) : parts.shard + beside;
    return std::max(exchanged, taken_over);
  });
}

std::int64_t outer_numel(const ModelPlan& plan, const topology::Layout& layout, int group, const OuterOptions& outer,
                         const Compression& compression, bool measures, const topology::ExchangeRules& rules) {
  const bool is_compressed = compression.kind != Compression::Kind::none;
  if (!needs_anchor(outer) && !is_compressed && !measures) return 0;
  return most_of(plan, layout, group, {}, rules, [&](const RoundParts& parts) {
    return parts.slice * (1 + outer_moments_of(outer.outer)) + (is_compressed ? parts.slice + parts.owned : 0);
  });
}

std::int64_t compressed_exchange_bytes(const ModelPlan& plan, const topology::Layout& layout, int group,
                                       const Compression& compression, bool delayed,
                                       const topology::ExchangeRules& rules) {
  return most_of(plan, layout, group, compression, rules, [&](const RoundParts& parts) {
    const std::int64_t messages = most_at_once(parts.encoded, rules.concurrency);
    const std::int64_t copy = delayed ? parts.slice : 0, taken_over = delayed ? 2 * parts.shard : 0;
    const std::int64_t sums = 3 * parts.largest * kFp32 + encoded_bytes(compression, parts.largest);  // fp64 and fp32
    const std::int64_t residuals = parts.slice + parts.owned;
    const std::int64_t under_way = messages + sums + (copy + 2 * parts.slice + residuals) * kFp32;
    const std::int64_t after = std::max(copy + 3 * parts.slice, parts.slice + parts.shard) + residuals;
    return std::max({under_way, after * kFp32, taken_over * kFp32});
  });
}

namespace {

// MemoryTable::peak. `walk` has walked steps, whose peak is `step`.
std::int64_t peak_of(const MemoryTable& table, const ModelPlan& plan, const MemoryOptions& options, std::int64_t step,
                     StepWalk& walk) {
  std::int64_t always = 0;
  for (const MemoryRow& row : table.rows) {
    if (!row.on_host && std::ranges::count(kAlwaysThere, row.purpose) > 0) always += row.bytes;
  }
  const std::int64_t idle = walk.idle(), exchange = options.gpu ? 0 : options.exchange_bytes;
  std::int64_t training = step;
  if (options.evaluates_mean) {
    const std::int64_t pass = walk.evaluate(evaluation_schedule(plan, options.schedule.prefetch));
    const std::int64_t its_exchange = idle + (options.gpu ? 0 : options.mean_exchange_bytes);
    training = std::max(step, table.bytes(MemoryPurpose::mean) + std::max(pass, its_exchange));
  }
  return always + (options.delayed ? training + exchange : std::max(training, idle + exchange));
}

}  // namespace

MemoryTable predict_memory(const ModelPlan& plan, const MemoryOptions& options) {
  base::require(options.shards >= 1 && options.replicas >= 1, "memory of {} replicas of {} shards", options.replicas,
                options.shards);
  std::int64_t arena = 0, trained = 0, largest_trained = 0;
  for (const UnitSpec& unit : plan.units) {
    const std::int64_t numel = unit.arena_numel(options.shards), bytes = numel * kFp32;
    arena += numel * options.master_bytes;
    if (unit.frozen) continue;
    trained += bytes;
    largest_trained = std::max(largest_trained, bytes);
  }
  const UpdateRules rules = update_rules(plan, options.updates);
  StepWalk walk(plan, options);
  const Schedule step = step_schedule(plan, options.schedule);
  for (int i = 0; i < 2; ++i) walk.run(step);
  const int staged = options.offload ? 2 : options.master_bytes == kFp32 ? 0 : 1;  // parameters, gradients
  const Moment peak = walk.peak();
  MemoryTable table{
      {
          {MemoryPurpose::parameters, arena},
          {MemoryPurpose::gradients, options.schedule.fused_backward ? largest_trained : trained},
          {MemoryPurpose::moments, moment_bytes(plan, rules, options.shards), options.offload},
          {MemoryPurpose::gathered, peak.gathered},
          {MemoryPurpose::gradient_buffers, peak.gradient_buffers},
          {MemoryPurpose::activations, peak.activations},
          {MemoryPurpose::communication, peak.communication},
          {MemoryPurpose::update, update_workspace_bytes(plan, rules, options.shards)},
          {MemoryPurpose::staging, staged * staging_bytes(plan, options.shards), options.offload},
          {MemoryPurpose::exchange, std::max(options.exchange_bytes, options.mean_exchange_bytes), options.gpu},
          {MemoryPurpose::outer, options.outer_numel * kFp32, options.gpu},
          {MemoryPurpose::prox_anchor, options.proximal ? trained / kFp32 * options.master_bytes : 0},
          {MemoryPurpose::mean, options.evaluates_mean ? arena : 0},
      },
      walk.peak_buffers()};
  table.peak = peak_of(table, plan, options, peak.sum(), walk);
  return table;
}

std::string describe(const MemoryTable& table) {
  std::string text;
  const auto append = [&](const char* label, std::int64_t bytes, bool on_host = false) {
    text += fmt::format("{:<19} {:>10}{}\n", label, base::human(base::Bytes{bytes}), on_host ? " (host)" : "");
  };
  for (const MemoryRow& row : table.rows) {
    append(kPurposes[static_cast<int>(row.purpose)].label, row.bytes, row.on_host);
  }
  append("at once, at most", table.peak);
  if (table.host_total() > 0) append("total on the host", table.host_total());
  return text;
}

}  // namespace fedshard::plan
