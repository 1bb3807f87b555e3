// The memory of a rank, stated before the first step from the plan and the layout alone.
//
// What a step gathers and reduces is found by walking its schedule with the engine's own rules, not by a formula of its
// own. The surprising part: the step is walked twice. Buffers that the first step leaves for reuse lie idle while the
// second one gathers the head, so a run reaches its peak only then. They lie idle in a round, too.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fedshard/model/activations.h"
#include "fedshard/plan/compression.h"
#include "fedshard/plan/outer.h"
#include "fedshard/plan/schedule.h"
#include "fedshard/plan/updates.h"
#include "fedshard/topology/layout.h"
#include "fedshard/topology/scheme.h"

namespace fedshard::plan {

enum class MemoryPurpose {
  parameters,        // arena of the shards, in the master dtype
  gradients,         // arena of their gradients, fp32 (of one unit, with fused_backward); none of frozen ones
  moments,           // arenas of the optimizer's moments, fp32, of the elements that have them
  gathered,          // units gathered, in the compute dtype
  gradient_buffers,  // gradients on their way to the arena, in the reduce dtype
  activations,       // what autograd keeps in a micro-step, and what the stage at work takes beside it
  communication,     // what rings receive into while they sum (comm/ring.cpp)
  update,            // what Muon gathers whole matrices to and computes in (plan/updates.h)
  staging,           // a unit's shard in fp32 while it is updated, where the arenas don't serve (optim/workplace.h)
  exchange,          // a round's messages and results, or of a step of the warm-up (federation/exchange.cpp)
  outer,             // the outer optimizer's anchor and moments, of the rank's slice, fp32 (federation/outer_state.h)
  prox_anchor,       // FedProx's anchor of the shard, in the master dtype (federation/proximal.h)
  mean,              // arena of the groups' mean, with which a federation evaluates
};
const char* name_of(MemoryPurpose purpose);  // "gradient_buffers", the key in metrics.jsonl

struct MemoryOptions {
  int shards = 1, replicas = 1;          // of the rank's group
  bool evaluates_mean = false;           // of the groups, which takes an arena
  bool proximal = false;                 // whether steps between them have FedProx's term
  std::int64_t exchange_bytes = 0;       // of rounds and the warm-up, the most at once; from the functions below
  std::int64_t mean_exchange_bytes = 0;  // of the mean that is evaluated; likewise
  bool delayed = false;                  // whether rounds' exchanges run beside steps
  std::int64_t outer_numel = 0;          // of the anchor and outer moments; likewise
  int master_bytes = 4;                  // an element of the parameters that are kept
  int compute_bytes = 4;                 // an element of gathered parameters
  int reduce_bytes = 4;                  // an element of gradients while they are summed
  UpdateOptions updates = {};            // decides the moments
  bool gpu = false;                      // computes; what a round exchanges and keeps is then in the host's memory
  bool offload = false;                  // ... and so are the moments
  std::vector<model::StageActivations> activations = {};  // of each stage; empty: none
  std::int64_t shared_activation_bytes = 0;               // what lives all the time beside them
  ScheduleOptions schedule = {};
};

struct MemoryRow {
  MemoryPurpose purpose = MemoryPurpose::parameters;
  std::int64_t bytes = 0;
  bool on_host = false;  // and not in the memory of the GPU that computes
};

// One row a purpose, in the order of MemoryPurpose.
struct MemoryTable {
  std::vector<MemoryRow> rows;
  // The most that gathered units and gradients under way take together, whatever else there is at that moment.
  std::int64_t peak_buffers = 0;
  // The most at once of all rows but those on the host. Where there are no rounds it is their sum. A step, a round's
  // exchange and the evaluation of a mean take turns, unless there is a delay: then it is what an exchange takes that
  // comes at a step's worst moment. With Muon it is above what is there, whose buffers come when the activations are
  // gone.
  std::int64_t peak = 0;
  std::int64_t bytes(MemoryPurpose purpose) const;
  std::int64_t host_total() const;  // the sum of the rows on the host
};

// What a round takes depends on.
struct RoundKind {
  bool keeps_anchor = false;  // the mean is not the new parameters, which take room beside it
  bool delayed = false;       // runs beside training, from a copy of the slice and to an arena of the shard
  topology::ExchangeRules rules = {};
};

// The elements of the messages and results that a round's exchange, or the sum of gradients over groups, takes at once
// (federation/exchange.cpp), on the rank of the group that needs most: the shard, and beside it the messages of as many
// buckets as are under way.
std::int64_t exchange_numel(const ModelPlan& plan, const topology::Layout& layout, int group,
                            const RoundKind& round = {});

// The elements of what the outer optimizer keeps, likewise: anchor, moments, and with compression the residuals of both
// directions.
// `measures`: an anchor is kept in any case.
std::int64_t outer_numel(const ModelPlan& plan, const topology::Layout& layout, int group, const OuterOptions& outer,
                         const Compression& compression, bool measures = false,
                         const topology::ExchangeRules& rules = {});

// The bytes that a round's exchange takes at once where it is compressed, likewise. While messages are under way: the
// parts' encoded bytes both ways, and in fp32 the slice's change, its mean and the next residuals; after them the
// parameters that the mean leads to, in the place of the messages. With bf16 masters an upper bound.
std::int64_t compressed_exchange_bytes(const ModelPlan& plan, const topology::Layout& layout, int group,
                                       const Compression& compression, bool delayed = false,
                                       const topology::ExchangeRules& rules = {});

// Bytes of the rank that needs most. `gathered` to `communication` are those of the moment of a step when their sum is
// largest, from the second step on; buffers that are kept for reuse count where they were used last. Takes milliseconds
// for any model; no arena or buffer is allocated. Throws what update_rules throws.
MemoryTable predict_memory(const ModelPlan& plan, const MemoryOptions& options);

// For people: one line a row, then the peak, in aligned columns; each line ends with a newline.
std::string describe(const MemoryTable& table);

}  // namespace fedshard::plan
