// Our collectives over point-to-point messages: rings, as the cost analysis assumes (cost.md, section 1). They exist
// because Gloo's reduce-scatter moves twice its formula and its all-reduce's sum depends on the rank.
//
// Each communicator has one worker thread that runs its operations in order. CPU tensors only.
#pragma once
#include <memory>

#include "fedshard/comm/communicator.h"

namespace fedshard::comm {

// `counter` must outlive the communicator. Destruction waits for the operations already queued.
std::unique_ptr<Communicator> make_ring_communicator(Members members, std::unique_ptr<Transport> transport,
                                                     TrafficCounter& counter, Watcher watcher = nullptr);

}  // namespace fedshard::comm
