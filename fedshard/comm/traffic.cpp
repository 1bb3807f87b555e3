#include "fedshard/comm/traffic.h"

namespace fedshard::comm {

const char* name_of(Purpose purpose) {
  constexpr const char* kNames[kPurposes] = {"gather", "reduce", "replica", "aggregate", "state", "control"};
  return kNames[static_cast<int>(purpose)];
}

Traffic& Traffic::operator+=(const Traffic& other) {
  for (int p = 0; p < kPurposes; ++p) by_purpose[p] += other.by_purpose[p];
  intra_group += other.intra_group;
  inter_group += other.inter_group;
  return *this;
}

void TrafficCounter::add(Purpose purpose, int from, int to, std::int64_t bytes) {
  by_purpose_[static_cast<int>(purpose)] += bytes;
  (group_of_[from] == group_of_[to] ? intra_group_ : inter_group_) += bytes;
}

Traffic TrafficCounter::read() const {
  Traffic traffic;
  for (int p = 0; p < kPurposes; ++p) traffic.by_purpose[p] = by_purpose_[p];
  traffic.intra_group = intra_group_;
  traffic.inter_group = inter_group_;
  return traffic;
}

}  // namespace fedshard::comm
