// The messages of an exchange: one a peer.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "fedshard/comm/communicator.h"

namespace fedshard::federation {

// One parcel for each peer, of so many elements, uninitialised, on the CPU.
std::vector<comm::Parcel> parcels_of(const std::map<int, std::int64_t>& sizes, at::ScalarType dtype);

// The parcel of a peer, which must be among them.
const at::Tensor& buffer_of(const std::vector<comm::Parcel>& parcels, int peer);

}  // namespace fedshard::federation
