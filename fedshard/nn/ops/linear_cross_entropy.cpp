#include "fedshard/nn/ops/linear_cross_entropy.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "fedshard/base/error.h"

namespace fedshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct ChunkLoss {
  at::Tensor sum;              // 0-dim fp64
  at::Tensor logits_gradient;  // [rows, V] in the inputs' dtype, where asked for
};

// A row's gradient is softmax(logits) - onehot(target).
ChunkLoss chunk_loss(const at::Tensor& hidden, const at::Tensor& table, const at::Tensor& targets, bool gradient) {
  const at::Tensor logits = at::linear(hidden, table);
  at::Tensor wide = logits.to(at::kFloat);  // in fp32 the same tensor
  const at::Tensor target = targets.unsqueeze(1);
  const at::Tensor largest = wide.amax(1, /*keepdim=*/true);
  const at::Tensor chosen = wide.gather(1, target) - largest;
  wide.sub_(largest).exp_();
  const at::Tensor total = wide.sum(1, /*keepdim=*/true);
  ChunkLoss result{(total.log() - chosen).sum(at::kDouble), {}};
  if (gradient) {
    wide.div_(total);
    wide.scatter_add_(1, target, at::full({1, 1}, -1.0, wide.options()).expand_as(target));
    if (!logits.is_same(wide)) logits.copy_(wide);
    result.logits_gradient = logits;
  }
  return result;
}

// sum [V, H] fp32 += gradient [rows, V]^T hidden [rows, H]. A product in another dtype needs memory of its own, so it
// is made for `slice` rows of the table at a time.
void add_product(const at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& hidden, std::int64_t slice) {
  if (gradient.scalar_type() == at::kFloat) {
    sum.addmm_(gradient.t(), hidden);
    return;
  }
  for (std::int64_t row = 0; row < sum.size(0); row += slice) {
    const std::int64_t rows = std::min(slice, sum.size(0) - row);
    sum.narrow(0, row, rows).add_(at::mm(gradient.narrow(1, row, rows).t(), hidden));
  }
}

// Sums the loss, and those gradients that have memory to go into, chunk by chunk.
struct HeadPass {
  at::Tensor hidden, table;
  std::int64_t chunk_rows = 1;
  at::Tensor hidden_gradient, table_gradient;  // zeros where wanted, otherwise undefined

  at::Tensor run(const at::Tensor& labels) {
    const at::Tensor counted = at::nonzero(labels != kMaskedLabel).squeeze(1);
    const bool all = counted.numel() == labels.numel();
    // A slice's product and its fp32 copy, from which it is added, take no more than a chunk's logits in bf16.
    const std::int64_t logits = std::min(chunk_rows, counted.numel()) * table.size(0);
    const std::int64_t slice = std::max<std::int64_t>(1, logits / (3 * hidden.size(1)));
    at::Tensor loss = at::zeros({}, hidden.options().dtype(at::kDouble));
    for (std::int64_t row = 0; row < counted.numel(); row += chunk_rows) {
      const std::int64_t rows = std::min(chunk_rows, counted.numel() - row);
      const at::Tensor places = counted.narrow(0, row, rows);
      const at::Tensor chunk = all ? hidden.narrow(0, row, rows) : hidden.index_select(0, places);
      const bool gradient = hidden_gradient.defined() || table_gradient.defined();
      const ChunkLoss result = chunk_loss(chunk, table, labels.index_select(0, places), gradient);
      loss.add_(result.sum);
      if (hidden_gradient.defined() && all) {
        at::Tensor out = hidden_gradient.narrow(0, row, rows);
        at::mm_out(out, result.logits_gradient, table);
      } else if (hidden_gradient.defined()) {
        hidden_gradient.index_copy_(0, places, at::mm(result.logits_gradient, table));
      }
      if (table_gradient.defined()) add_product(table_gradient, result.logits_gradient, chunk, slice);
    }
    return loss.to(at::kFloat);
  }
};

// Multiplies in fp32 and rounds once: a scale that is rounded itself would tilt every gradient below the head.
void scale_in_place(at::Tensor& gradient, const at::Tensor& scale) {
  if (!gradient.defined()) return;
  if (gradient.scalar_type() == at::kFloat) {
    gradient.mul_(scale);
  } else {
    gradient.copy_(gradient.to(at::kFloat).mul_(scale));
  }
}

struct LinearCrossEntropySum : torch::autograd::Function<LinearCrossEntropySum> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& table,
                            const at::Tensor& labels, std::int64_t chunk_rows, bool hidden_wanted, bool table_wanted) {
    HeadPass pass{hidden, table, chunk_rows, {}, {}};
    if (hidden_wanted) pass.hidden_gradient = at::zeros_like(hidden);
    if (table_wanted) pass.table_gradient = at::zeros_like(table, at::kFloat);
    const at::Tensor loss = pass.run(labels);
    // Not by save_for_backward: backward scales these in place and gives them away.
    ctx->saved_data["hidden"] = pass.hidden_gradient;
    ctx->saved_data["table"] = pass.table_gradient;
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::require(!ctx->saved_data.empty(), "a second backward through one head: its gradients were given away");
    at::Tensor hidden = ctx->saved_data["hidden"].toTensor();
    at::Tensor table = ctx->saved_data["table"].toTensor();
    ctx->saved_data.clear();
    scale_in_place(hidden, grads[0]);
    scale_in_place(table, grads[0]);
    return {hidden, table, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& table, const at::Tensor& labels,
                                    std::int64_t chunk_rows) {
  base::require(chunk_rows >= 1, "chunks of {} rows", chunk_rows);
  const bool enabled = c10::GradMode::is_enabled();
  return LinearCrossEntropySum::apply(hidden, table, labels, chunk_rows, enabled && hidden.requires_grad(),
                                      enabled && table.requires_grad());
}

at::Tensor linear_cross_entropy_sum_reference(const at::Tensor& hidden, const at::Tensor& table,
                                              const at::Tensor& labels) {
  return at::cross_entropy_loss(at::linear(hidden, table).to(at::kFloat), labels, /*weight=*/{}, at::Reduction::Sum,
                                kMaskedLabel);
}

}  // namespace fedshard::nn
