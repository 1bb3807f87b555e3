// The figures of `fedshard cost`, as a table for people and as JSON for programs.
#pragma once
#include <optional>
#include <string>

#include "fedshard/cost/summary.h"
#include "fedshard/plan/memory.h"

namespace fedshard::forecast {

struct CostReport {
  const cost::Setting& setting;
  const cost::Summary& summary;
  std::optional<plan::MemoryTable> memory;  // of the rank that needs most
  std::optional<cost::Bytes> run;           // all training of a config, all ranks, without evaluations
};

// Lines that end with a newline. Bytes are told in binary units and, where it matters, as they are.
std::string text_of(const CostReport& report);

// One object; keys in docs/cost.md. Whole numbers as they are, fractions as text ("4/25").
std::string json_of(const CostReport& report);

}  // namespace fedshard::forecast
