// The life of a process that takes part in `fedshard bench aggregate`.
#pragma once
#include <filesystem>

#include "fedshard/base/error.h"
#include "fedshard/bench/aggregate.h"
#include "fedshard/control/place.h"

namespace fedshard::bench {

// Measures as the rank that `place` says. Rank 0 prints the table to standard output, line by line, and at the end
// writes it to `csv` (empty: to no file). Does not return after an error: it says so on standard error and leaves by
// _exit with the error's status, because a collective that failed may hold threads that can't be ended.
base::ExitStatus run_aggregate_rank(const AggregateOptions& options, const topology::Layout& layout,
                                    const control::Place& place, const std::filesystem::path& csv);

}  // namespace fedshard::bench
