#include "fedshard/plan/updates.h"

#include <algorithm>

#include "fedshard/base/error.h"
#include "fedshard/plan/patterns.h"

namespace fedshard::plan {
namespace {

constexpr std::int64_t kFp32 = 4, kBf16 = 2;

bool has_muon(const std::vector<UpdateRule>& rules) {
  return std::any_of(rules.begin(), rules.end(), [](const UpdateRule& r) { return r.update == Update::muon; });
}

}  // namespace

int moments_of(Update update) {
  switch (update) {
    case Update::adamw:
      return 2;
    case Update::none:
    case Update::sgd:
      return 0;
    case Update::sgd_momentum:
    case Update::muon:
      return 1;
  }
  base::fail<base::RunError>("no update has the number {}", static_cast<int>(update));
}

bool is_muon_matrix(const ModelPlan& plan, int unit, int parameter) {
  return plan.units[unit].parameters[parameter].shape.size() == 2 && !plan.stages.front().uses(unit) &&
         !plan.stages.back().uses(unit);
}

UpdateRules update_rules(const ModelPlan& plan, const UpdateOptions& options) {
  for (const ParameterGroup& group : options.groups) require_matches(plan, group.params);
  UpdateRules rules;
  for (int u = 0; u < static_cast<int>(plan.units.size()); ++u) {
    const std::vector<ParameterSpec>& parameters = plan.units[u].parameters;
    std::vector<UpdateRule>& of_unit = rules.emplace_back();
    for (int p = 0; p < static_cast<int>(parameters.size()); ++p) {
      UpdateRule rule{options.update, 1, parameters[p].is_matrix() ? options.weight_decay : 0};
      if (plan.units[u].frozen) rule = {Update::none, 1, 0};
      if (rule.update == Update::muon && !is_muon_matrix(plan, u, p)) rule.update = Update::adamw;
      const auto group = std::find_if(options.groups.begin(), options.groups.end(), [&](const ParameterGroup& g) {
        return matches_any(g.params, parameters[p].name);
      });
      if (group != options.groups.end() && rule.update != Update::none) {
        rule.lr_factor = group->lr_factor;
        rule.weight_decay = group->weight_decay.value_or(rule.weight_decay);
      }
      of_unit.push_back(rule);
    }
  }
  return rules;
}

std::int64_t update_bytes(const ModelPlan& plan, const UpdateRules& rules, std::int64_t shards) {
  std::int64_t bytes = 0;
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    if (has_muon(rules[u])) bytes += shards * (shards - 1) * plan.units[u].shard_numel(shards) * kFp32;
  }
  return bytes;
}

std::vector<std::vector<topology::Range>> moment_ranges(const ModelPlan& plan, const UpdateRules& rules, int moments,
                                                        std::int64_t shards, std::int64_t shard) {
  std::vector<std::vector<topology::Range>> ranges(plan.units.size());
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    const topology::Range held = topology::shard_range(plan.units[u].numel(), shards, shard);
    std::int64_t begin = 0;
    for (std::size_t p = 0; p < rules[u].size(); ++p) {
      const std::int64_t end = begin + plan.units[u].parameters[p].numel();
      const topology::Range range{std::max(begin, held.begin), std::min(end, held.end)};
      begin = end;
      if (range.size() <= 0 || moments_of(rules[u][p].update) < moments) continue;
      if (!ranges[u].empty() && ranges[u].back().end == range.begin) {
        ranges[u].back().end = range.end;
      } else {
        ranges[u].push_back(range);
      }
    }
  }
  return ranges;
}

MomentCounts moment_counts(const UpdateRules& rules) {
  MomentCounts counts{moments_of(Update::adamw), 0};
  for (const auto& of_unit : rules) {
    for (const UpdateRule& rule : of_unit) {
      counts.least = std::min(counts.least, moments_of(rule.update));
      counts.most = std::max(counts.most, moments_of(rule.update));
    }
  }
  return counts;
}

std::int64_t exchanged_moments(const ModelPlan& plan, const UpdateRules& rules) {
  std::int64_t moments = 0;
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    if (!plan.units[u].is_exchanged()) continue;
    for (std::size_t p = 0; p < rules[u].size(); ++p) {
      moments += plan.units[u].parameters[p].numel() * moments_of(rules[u][p].update);
    }
  }
  return moments;
}

std::int64_t staging_bytes(const ModelPlan& plan, std::int64_t shards) {
  std::int64_t largest = 0;
  for (const UnitSpec& unit : plan.units) {
    if (!unit.frozen) largest = std::max(largest, unit.shard_numel(shards));
  }
  return largest * kFp32;
}

std::int64_t moment_bytes(const ModelPlan& plan, const UpdateRules& rules, std::int64_t shards) {
  const auto [least, most] = moment_counts(rules);
  std::int64_t bytes = 0;
  for (const UnitSpec& unit : plan.units) bytes += least * unit.arena_numel(shards) * kFp32;
  for (int moments = least + 1; moments <= most; ++moments) {
    std::int64_t largest = 0;
    for (std::int64_t shard = 0; shard < shards; ++shard) {
      std::int64_t numel = 0;
      for (const auto& of_unit : moment_ranges(plan, rules, moments, shards, shard)) {
        for (const topology::Range& range : of_unit) numel += range.size();
      }
      largest = std::max(largest, numel);
    }
    bytes += largest * kFp32;
  }
  return bytes;
}

std::int64_t update_workspace_bytes(const ModelPlan& plan, const UpdateRules& rules, std::int64_t shards) {
  std::int64_t gathered = 0, iteration = 0;
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (std::size_t p = 0; p < rules[u].size(); ++p) {
      if (rules[u][p].update != Update::muon) continue;
      gathered = std::max(gathered, shards * plan.units[u].shard_numel(shards) * kFp32);
      const ParameterSpec& parameter = plan.units[u].parameters[p];
      const std::int64_t rows = std::min(parameter.shape[0], parameter.shape[1]);
      iteration = std::max(iteration, (3 * parameter.numel() + 2 * rows * rows) * kBf16);
    }
  }
  return gathered + iteration;
}

}  // namespace fedshard::plan
