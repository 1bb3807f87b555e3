#include "fedshard/eval/perplexity.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace fedshard::eval {
namespace {

// `count` sequences from `first` on, filled up with masked ones to `batch`, on `device`.
nn::MicroBatch batch_of(const data::TokenDataset& dataset, std::int64_t first, std::int64_t count,
                        const EvalOptions& options, at::Device device) {
  const std::int64_t length = dataset.seq_len(), batch = options.batch;
  const at::Tensor ids = at::zeros({batch, length + 1}, at::kInt);
  const std::span<std::int32_t> out(ids.mutable_data_ptr<std::int32_t>(), static_cast<std::size_t>(ids.numel()));
  for (std::int64_t i = 0; i < count; ++i) {
    dataset.read(first + i,
                 out.subspan(static_cast<std::size_t>(i * (length + 1)), static_cast<std::size_t>(length + 1)));
  }
  nn::MicroBatch result = nn::micro_batch_of(ids.to(device), options.document_end);
  result.labels.narrow(0, count, batch - count).fill_(-100);
  return result;
}

}  // namespace

double EvalResult::perplexity() const { return std::exp(loss); }

shard::LossSum evaluate(shard::Engine& engine, const shard::Arena& parameters, const data::TokenDataset& dataset,
                        int world, int rank, const EvalOptions& options) {
  const std::int64_t each_pass = options.batch * world;  // sequences of all ranks
  const bool limited = options.max_passes > 0 && options.max_passes <= dataset.size() / each_pass;
  const data::EvalSlice slice =
      data::eval_slice(limited ? options.max_passes * each_pass : dataset.size(), world, rank, options.batch);
  shard::LossSum mine;
  for (std::int64_t pass = 0; pass < slice.passes; ++pass) {
    const std::int64_t done = pass * options.batch;
    const std::int64_t count = std::clamp<std::int64_t>(slice.count - done, 0, options.batch);
    const shard::LossSum sum =
        engine.evaluate(batch_of(dataset, slice.first + done, count, options, engine.device()), parameters);
    mine.loss += sum.loss;
    mine.tokens += sum.tokens;
  }
  return mine;
}

EvalResult sum_over_world(const comm::Axes& axes, const shard::LossSum& mine) {
  std::array<double, 2> sums{mine.loss, mine.tokens};
  comm::sum_over_world(axes, sums);
  return {sums[1] > 0 ? sums[0] / sums[1] : 0.0, static_cast<std::int64_t>(sums[1])};
}

}  // namespace fedshard::eval
