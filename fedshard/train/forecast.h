// What a run will need, from its config alone: memory of a rank and bytes on the wire. Nothing is allocated.
#pragma once
#include <string>

#include "fedshard/plan/memory.h"
#include "fedshard/topology/layout.h"
#include "fedshard/train/config.h"

namespace fedshard::train {

// Of the rank that needs most.
plan::MemoryTable forecast_memory(const Config& config, const topology::Layout& layout);

// Payload bytes over all ranks, of a step, a round and all of training, and of a rank on average; a few lines.
std::string forecast_traffic(const Config& config, const topology::Layout& layout);

// `fedshard train --dry-run`: config, layout, memory and traffic, to standard output. The config and the tables are
// TOML and TOML comments, so the output is a config again.
void print_dry_run(const Config& config, const topology::Layout& layout);

}  // namespace fedshard::train
