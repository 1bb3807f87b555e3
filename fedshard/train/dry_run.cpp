#include "fedshard/train/dry_run.h"

#include <fmt/format.h>

#include <cstdio>

#include "fedshard/plan/llama_units.h"

namespace fedshard::train {

void print_dry_run(const Config& config, const topology::Layout& layout) {
  const plan::ModelPlan plan = plan::llama_plan(dims_of(config.model));
  fmt::print("{}\n# {}\n# {} parameters in {} units\n", resolved_toml(config), layout.describe(), plan.numel(),
             plan.units.size());
}

}  // namespace fedshard::train
