#include "fedshard/nn/ops/cross_entropy.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace fedshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements of one fp32 working copy: 16 MiB, small beside any model's activations and enough rows to keep threads busy.
constexpr std::int64_t kChunkElements = std::int64_t{1} << 22;

std::int64_t rows_of_a_chunk(const at::Tensor& logits) {
  return std::max<std::int64_t>(1, kChunkElements / std::max<std::int64_t>(1, logits.size(1)));
}

struct CrossEntropySum : torch::autograd::Function<CrossEntropySum> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& labels) {
    const at::Tensor counted = labels != kMaskedLabel;
    const at::Tensor targets = at::where(counted, labels, at::zeros_like(labels)).unsqueeze(1);
    at::Tensor log_sums = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
    at::Tensor losses = at::empty_like(log_sums);
    const std::int64_t step = rows_of_a_chunk(logits);
    for (std::int64_t row = 0; row < logits.size(0); row += step) {
      const std::int64_t rows = std::min(step, logits.size(0) - row);
      const at::Tensor wide = logits.narrow(0, row, rows).to(at::kFloat);
      const at::Tensor log_sum = at::logsumexp(wide, {1});
      log_sums.narrow(0, row, rows).copy_(log_sum);
      losses.narrow(0, row, rows).copy_(log_sum - wide.gather(1, targets.narrow(0, row, rows)).squeeze(1));
    }
    ctx->save_for_backward({logits, targets, counted, log_sums});
    return at::where(counted, losses, at::zeros_like(losses)).sum();
  }

  // The gradient of a row is softmax(logits) - onehot(label), times the incoming scalar; zero where masked.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &counted = saved[2], &log_sums = saved[3];
    const at::Tensor scale = at::where(counted, grads[0], at::zeros_like(grads[0])).unsqueeze(1);
    const at::Tensor minus_one = at::full({1, 1}, -1.0, log_sums.options());
    at::Tensor grad = at::empty_like(logits);
    const std::int64_t step = rows_of_a_chunk(logits);
    for (std::int64_t row = 0; row < logits.size(0); row += step) {
      const std::int64_t rows = std::min(step, logits.size(0) - row);
      at::Tensor wide = logits.narrow(0, row, rows).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      wide.sub_(log_sums.narrow(0, row, rows).unsqueeze(1)).exp_();
      wide.scatter_add_(1, targets.narrow(0, row, rows), minus_one.expand({rows, 1}));
      // A masked row may hold anything, infinities included: it is replaced, not multiplied by zero.
      wide.mul_(scale.narrow(0, row, rows)).masked_fill_(counted.narrow(0, row, rows).logical_not().unsqueeze(1), 0.0);
      grad.narrow(0, row, rows).copy_(wide);
    }
    return {grad, at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels) {
  return CrossEntropySum::apply(logits, labels);
}

at::Tensor cross_entropy_sum_reference(const at::Tensor& logits, const at::Tensor& labels) {
  return at::cross_entropy_loss(logits.to(at::kFloat), labels, /*weight=*/{}, at::Reduction::Sum, kMaskedLabel);
}

}  // namespace fedshard::nn
