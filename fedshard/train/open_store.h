// The store of a run, as one of its processes finds it.
// A surprise: a launcher may serve it itself. Ours does, and torchrun's agent, unless it is told not to; else the first
// process does.
#pragma once
#include <chrono>
#include <memory>

#include "fedshard/comm/store.h"
#include "fedshard/control/place.h"

namespace fedshard::train {

// may_serve: false in a process that opens it once more. Throws what Store::serve, Store::connect and
// control::listen_on throw.
std::shared_ptr<comm::Store> open_store(const control::Place& place, std::chrono::milliseconds timeout,
                                        bool may_serve = true);

}  // namespace fedshard::train
