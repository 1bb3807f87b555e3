#include "fedshard/optim/segments.h"

#include <algorithm>

namespace fedshard::optim {

std::vector<Segment> segments_of(const plan::UnitSpec& unit, topology::Range held) {
  std::vector<Segment> segments;
  std::int64_t begin = 0;
  for (const plan::ParameterSpec& parameter : unit.parameters) {
    const std::int64_t end = begin + parameter.numel();
    const topology::Range range{std::max(begin, held.begin), std::min(end, held.end)};
    begin = end;
    if (range.size() <= 0) continue;
    if (!segments.empty() && segments.back().decays == parameter.is_matrix()) {
      segments.back().range.end = range.end;
    } else {
      segments.push_back({range, parameter.is_matrix()});
    }
  }
  return segments;
}

}  // namespace fedshard::optim
