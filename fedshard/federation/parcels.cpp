#include "fedshard/federation/parcels.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "fedshard/base/error.h"

namespace fedshard::federation {

std::vector<comm::Parcel> parcels_of(const std::map<int, std::int64_t>& sizes, at::ScalarType dtype) {
  std::vector<comm::Parcel> result;
  for (const auto& [peer, size] : sizes) result.push_back({peer, at::empty({size}, dtype)});
  return result;
}

const at::Tensor& buffer_of(const std::vector<comm::Parcel>& parcels, int peer) {
  const auto found =
      std::find_if(parcels.begin(), parcels.end(), [&](const comm::Parcel& p) { return p.peer == peer; });
  base::require(found != parcels.end(), "no parcel for peer {}", peer);
  return found->buffer;
}

}  // namespace fedshard::federation
