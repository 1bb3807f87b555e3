// The life of a process that trains: find the others, train, say how it ended. It holds one rank, or with virtual
// groups one of each group, as threads.
#pragma once
#include "fedshard/base/error.h"
#include "fedshard/config/config.h"
#include "fedshard/control/place.h"

namespace fedshard::train {

// Trains as the rank that `place` says. With several virtual groups `place` counts processes, and process p of S trains
// as ranks p, S + p, 2 S + p, ..., one of each group, in turn (turns.h); `config` must come from with_virtual_groups.
// The first process hosts store and coordinator too where nobody else does. Returns the first rank's status that is not
// ok. Does not return after an error: it reports to the coordinator and on standard error, then leaves by _exit with
// the error's status, because a collective that failed may hold threads that can't be ended.
base::ExitStatus run_ranks(const config::Config& config, const control::Place& place, int virtual_groups = 1);

}  // namespace fedshard::train
