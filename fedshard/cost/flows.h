// Who sends how much to whom: a step and a round as sums of messages, link by link. What a machine's tiers carry
// follows from these (tally.h), where closed forms (formulas.h) know totals alone.
//
// A surprise: nothing is estimated and no schedule is assumed here. Gathers and reductions are counted in the engine's
// own schedule (plan/schedule.h), and a round's messages in the parts that its exchange is made of (topology/ranges.h).
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "fedshard/cost/formulas.h"
#include "fedshard/plan/schedule.h"
#include "fedshard/topology/layout.h"

namespace fedshard::cost {

enum class Use { gather, reduce, replica, aggregate };
inline constexpr int kUses = 4;
const char* name_of(Use use);

// Payload of one link in one direction. Neither is 0.
struct Flow {
  int from = 0, to = 0;
  Use use = Use::gather;
  std::int64_t bytes = 0, messages = 0;
};
using FlowSink = std::function<void(const Flow&)>;

// How a collective goes about it. The program's own are rings; NCCL may choose otherwise.
enum class Algorithm {
  ring,
  recursive  // doubling and halving (Rabenseifner's all-reduce): as many bytes, log2 n messages; n a power of two
};

// How often each unit is gathered and reduced in a step, of all its micro-steps; Muon's gathers in fp32 apart.
struct UnitUses {
  std::vector<std::int64_t> gathers, reductions, update_gathers;
};
UnitUses uses_of(const plan::ModelPlan& plan, const TrafficOptions& options);

// Calls of collectives of one rank of a group in a step.
std::int64_t collectives_of(const UnitUses& uses, const topology::GroupShape& group);

// One step of all groups. Throws UsageError where `recursive` meets an axis that is no power of two.
void step_flows(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options,
                const UnitUses& uses, Algorithm algorithm, const FlowSink& out);

// The aggregation at a round's end; with one group nothing. Between groups they are point to point whatever the
// algorithm of the collectives.
void round_flows(const plan::ModelPlan& plan, const topology::Layout& layout, const TrafficOptions& options,
                 const FlowSink& out);

}  // namespace fedshard::cost
