#include "fedshard/comm/communicator.h"

#include <ATen/ATen.h>

namespace fedshard::comm {

std::vector<std::vector<double>> Communicator::collect(std::span<const double> values) {
  const auto length = static_cast<std::int64_t>(values.size());
  const at::Tensor all = at::empty({size() * length}, at::kDouble);
  double* data = all.mutable_data_ptr<double>();
  std::copy(values.begin(), values.end(), data + index() * length);
  all_gather(all, Purpose::control)->wait();
  std::vector<std::vector<double>> by_member;
  for (int member = 0; member < size(); ++member) {
    by_member.emplace_back(data + member * length, data + (member + 1) * length);
  }
  return by_member;
}

void Communicator::sum(std::span<double> values) {
  const auto by_member = collect(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = 0;
    for (const auto& theirs : by_member) values[i] += theirs[i];
  }
}

}  // namespace fedshard::comm
