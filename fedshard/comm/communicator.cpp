#include "fedshard/comm/communicator.h"

#include <ATen/ATen.h>

namespace fedshard::comm {

void Communicator::sum(std::span<double> values) {
  if (size() == 1) return;
  const auto length = static_cast<std::int64_t>(values.size());
  const at::Tensor all = at::empty({size() * length}, at::kDouble);
  double* data = all.mutable_data_ptr<double>();
  std::copy(values.begin(), values.end(), data + index() * length);
  all_gather(all, Purpose::control)->wait();
  for (std::int64_t i = 0; i < length; ++i) {
    double total = 0;
    for (int member = 0; member < size(); ++member) total += data[member * length + i];
    values[i] = total;
  }
}

}  // namespace fedshard::comm
