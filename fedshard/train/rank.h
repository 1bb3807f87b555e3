// One rank's life: find the others, train, say how it ended.
#pragma once
#include "fedshard/base/error.h"
#include "fedshard/control/place.h"
#include "fedshard/train/config.h"

namespace fedshard::train {

// Trains as the rank that `place` says. Hosts store and coordinator too where it is rank 0 and nobody else does. Does
// not return after an error: it reports to the coordinator and on standard error, then leaves by _exit with the error's
// status, because a collective that failed may hold threads that can't be ended.
base::ExitStatus run_rank(const Config& config, const control::Place& place);

}  // namespace fedshard::train
