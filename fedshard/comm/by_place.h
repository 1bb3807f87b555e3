// A backend for processes that hold several ranks: communicators whose members are all in this process stay inside it.
#pragma once
#include <memory>
#include <vector>

#include "fedshard/comm/transport.h"

namespace fedshard::comm {

// For one rank. `here`: the world ranks of this process, that one among them. Communicators of `here` alone are
// connected by `inside` (loopback), all others by `between`, also their messages between two ranks that are here: a
// communicator has one transport.
std::unique_ptr<Backend> make_backend_by_place(std::vector<int> here, std::unique_ptr<Backend> inside,
                                               std::unique_ptr<Backend> between);

}  // namespace fedshard::comm
