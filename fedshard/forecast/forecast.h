// What a run will need, from its config alone: memory of a rank and bytes on the wire. Nothing is allocated.
#pragma once
#include <optional>
#include <string>

#include "fedshard/config/config.h"
#include "fedshard/cost/formulas.h"
#include "fedshard/plan/memory.h"
#include "fedshard/topology/layout.h"

namespace fedshard::forecast {

// Of the rank that needs most.
plan::MemoryTable memory(const config::Config& config, const topology::Layout& layout);

// Payload bytes over all ranks, of all training: steps and rounds, without evaluations. Nothing where only the run will
// show how many steps each group makes.
std::optional<cost::Bytes> run_bytes(const config::Config& config, const topology::Layout& layout);

// Payload bytes over all ranks, of a step, a round and all of training, and of a rank on average; a few lines.
std::string traffic(const config::Config& config, const topology::Layout& layout);

// `fedshard train --dry-run`: config, layout, memory and traffic, to standard output. The config and the tables are
// TOML and TOML comments, so the output is a config again.
void print_dry_run(const config::Config& config, const topology::Layout& layout);

}  // namespace fedshard::forecast
