#include "fedshard/nn/unit_module.h"

#include <ATen/ATen.h>

#include "fedshard/base/error.h"

namespace fedshard::nn {

MicroBatch micro_batch_of(const at::Tensor& ids, std::optional<std::int64_t> end_of_text) {
  const std::int64_t length = ids.size(1) - 1;
  const auto part = [&](std::int64_t first) {
    return ids.narrow(1, first, length).to(at::kLong, /*non_blocking=*/false, /*copy=*/true).contiguous();
  };
  MicroBatch batch{part(0), part(1)};
  if (!end_of_text) return batch;
  const at::Tensor ends = (batch.tokens.cpu() == *end_of_text).to(at::kLong);
  batch.documents = ends.cumsum(1) - ends;
  return batch;
}

std::vector<std::int64_t> document_lengths(const MicroBatch& batch) {
  if (!batch.documents.defined()) return {};
  const at::Tensor documents = batch.documents.contiguous();
  base::require(documents.sizes() == batch.tokens.sizes() && documents.scalar_type() == at::kLong && documents.is_cpu(),
                "documents must be int64 on the CPU with the tokens' {} x {} positions", batch.tokens.size(0),
                batch.tokens.size(1));
  const std::span index(documents.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(documents.numel()));
  const auto tokens = static_cast<std::size_t>(documents.size(1));
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < index.size(); ++i) {
    const bool row_begins = i % tokens == 0;
    base::require(row_begins || index[i] >= index[i - 1], "document {} follows document {} in row {}", index[i],
                  index[i - 1], i / tokens);
    if (row_begins || index[i] != index[i - 1]) lengths.push_back(0);
    ++lengths.back();
  }
  return lengths;
}

}  // namespace fedshard::nn
