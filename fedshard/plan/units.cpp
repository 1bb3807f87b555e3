#include "fedshard/plan/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "fedshard/base/error.h"

namespace fedshard::plan {

using base::fail;
using base::UsageError;

std::int64_t ParameterSpec::numel() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t UnitSpec::numel() const { return offset_of(static_cast<int>(parameters.size())); }

std::int64_t UnitSpec::offset_of(int parameter) const {
  std::int64_t offset = 0;
  for (int i = 0; i < parameter; ++i) offset += parameters[i].numel();
  return offset;
}

std::int64_t UnitSpec::arena_numel(std::int64_t shards) const {
  constexpr std::int64_t kAlignment = 16;  // elements of fp32: one cache line, one AVX-512 register
  return (shard_numel(shards) + kAlignment - 1) / kAlignment * kAlignment;
}

bool StageSpec::uses(int unit) const { return std::find(units.begin(), units.end(), unit) != units.end(); }

std::int64_t ModelPlan::numel() const {
  return std::accumulate(units.begin(), units.end(), std::int64_t{0},
                         [](std::int64_t sum, const UnitSpec& unit) { return sum + unit.numel(); });
}

std::int64_t ModelPlan::exchanged_numel() const {
  const std::vector<std::int64_t> by_unit = exchanged_numel_by_unit();
  return std::accumulate(by_unit.begin(), by_unit.end(), std::int64_t{0});
}

std::vector<std::int64_t> ModelPlan::exchanged_numel_by_unit() const {
  std::vector<std::int64_t> by_unit;
  for (const UnitSpec& unit : units) by_unit.push_back(unit.is_exchanged() ? unit.numel() : 0);
  return by_unit;
}

std::int64_t ModelPlan::global_offset(int unit) const {
  std::int64_t offset = 0;
  for (int u = 0; u < unit; ++u) {
    base::require(units[u].origins.empty(), "the plan has been split: use global_runs");
    offset += units[u].numel();
  }
  return offset;
}

std::vector<GlobalRun> ModelPlan::global_runs(int unit, topology::Range held) const {
  const UnitSpec& spec = units[unit];
  if (held.size() <= 0) return {};
  if (spec.origins.empty()) return {{held, global_offset(unit) + held.begin}};
  std::vector<GlobalRun> runs;
  std::int64_t begin = 0;
  for (std::size_t p = 0; p < spec.parameters.size(); ++p) {
    const std::int64_t end = begin + spec.parameters[p].numel();
    const topology::Range part{std::max(begin, held.begin), std::min(end, held.end)};
    if (part.size() > 0) runs.push_back({part, spec.origins[p] + part.begin - begin});
    begin = end;
  }
  return runs;
}

int ModelPlan::stages_of(int unit) const {
  return static_cast<int>(
      std::count_if(stages.begin(), stages.end(), [&](const StageSpec& s) { return s.uses(unit); }));
}

int ModelPlan::first_trained_stage() const {
  const auto trains = [&](const StageSpec& s) {
    return std::any_of(s.units.begin(), s.units.end(), [&](int u) { return !units[u].frozen; });
  };
  return static_cast<int>(std::find_if(stages.begin(), stages.end(), trains) - stages.begin());
}

namespace {

void validate_parameters(const ModelPlan& plan) {
  std::set<std::string> names;
  for (const UnitSpec& unit : plan.units) {
    if (unit.parameters.empty()) fail<UsageError>("unit '{}' has no parameters; leave it out", unit.name);
    for (const ParameterSpec& parameter : unit.parameters) {
      for (const std::int64_t size : parameter.shape) {
        if (size < 1) fail<UsageError>("parameter '{}' has a dimension of {}", parameter.name, size);
      }
      if (!names.insert(parameter.name).second) {
        fail<UsageError>("two parameters have the name '{}'; a tied parameter belongs to one unit", parameter.name);
      }
    }
  }
}

}  // namespace

void ModelPlan::validate() const {
  validate_parameters(*this);
  if (stages.empty()) fail<UsageError>("the model has no stages");
  std::vector<std::vector<int>> uses(units.size());
  const int last = static_cast<int>(stages.size()) - 1;
  for (int s = 0; s <= last; ++s) {
    if (stages[s].units.empty()) fail<UsageError>("stage '{}' uses no unit", stages[s].name);
    for (const int unit : stages[s].units) {
      if (unit < 0 || unit >= static_cast<int>(units.size())) {
        fail<UsageError>("stage '{}' uses unit {}, but the model has {} units", stages[s].name, unit, units.size());
      }
      uses[unit].push_back(s);
    }
  }
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (uses[u].empty()) fail<UsageError>("no stage uses unit '{}'", units[u].name);
    if (uses[u].size() > 1 && uses[u] != std::vector<int>{0, last}) {
      fail<UsageError>("unit '{}' is used by {} stages; only the first and the last stage may share a unit",
                       units[u].name, uses[u].size());
    }
  }
  if (std::all_of(units.begin(), units.end(), [](const UnitSpec& u) { return u.frozen; })) {
    fail<UsageError>("every parameter is frozen: there is nothing to train");
  }
}

ModelPlan plan_of_units(const std::vector<std::int64_t>& numel) {
  constexpr std::int64_t kMost = std::int64_t{1} << 44;  // as of a model's parameters: what is counted of them fits
  ModelPlan plan;
  std::int64_t left = kMost;
  for (const std::int64_t count : numel) {
    if (count < 1) fail<UsageError>("--units: a unit has at least 1 element, not {}", count);
    if (count > left) fail<UsageError>("--units: there are at most {} elements in all", kMost);
    left -= count;
    const int u = static_cast<int>(plan.units.size());
    const std::string name = fmt::format("unit {}", u);
    plan.units.push_back({name, {{name, {count}, {}}}});
    plan.stages.push_back({name, {u}});
  }
  return plan;
}

}  // namespace fedshard::plan
