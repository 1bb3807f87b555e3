#include "fedshard/optim/segments.h"

#include <algorithm>

namespace fedshard::optim {

std::vector<Segment> segments_of(const plan::UnitSpec& unit, std::span<const plan::UpdateRule> rules,
                                 topology::Range held) {
  std::vector<Segment> segments;
  std::int64_t begin = 0;
  for (int p = 0; p < static_cast<int>(unit.parameters.size()); ++p) {
    const std::int64_t end = begin + unit.parameters[p].numel();
    const topology::Range range{std::max(begin, held.begin), std::min(end, held.end)};
    begin = end;
    if (range.size() <= 0) continue;
    if (!segments.empty() && segments.back().rule == rules[p] && rules[p].update != plan::Update::muon) {
      segments.back().range.end = range.end;
    } else {
      segments.push_back({range, p, rules[p]});
    }
  }
  return segments;
}

}  // namespace fedshard::optim
