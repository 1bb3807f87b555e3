#include "fedshard/nn/ops/swiglu_linear.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fedshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate).mul_(up); }

struct SwiGluLinear : torch::autograd::Function<SwiGluLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up,
                            const at::Tensor& matrix, bool recompute) {
    const at::Tensor active = swiglu(gate, up);
    ctx->save_for_backward({gate, up, matrix, recompute ? at::Tensor() : active});
    return at::linear(active, matrix);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &matrix = saved[2];
    const at::Tensor grad = grads[0].reshape({-1, matrix.size(0)});
    variable_list results(4);
    if (ctx->needs_input_grad(2)) {
      const at::Tensor active = saved[3].defined() ? saved[3] : swiglu(gate, up);
      results[2] = at::mm(grad.t(), active.reshape({-1, matrix.size(1)}));
    }
    if (!ctx->needs_input_grad(0) && !ctx->needs_input_grad(1)) return results;
    const at::Tensor active_grad = at::mm(grad, matrix).view(gate.sizes());
    if (ctx->needs_input_grad(0)) results[0] = at::silu_backward(active_grad * up, gate);
    if (ctx->needs_input_grad(1)) results[1] = at::silu(gate).mul_(active_grad);
    return results;
  }
};

}  // namespace

at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& matrix, bool recompute) {
  return SwiGluLinear::apply(gate, up, matrix, recompute);
}

at::Tensor swiglu_linear_reference(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& matrix) {
  return at::linear(at::silu(gate) * up, matrix);
}

}  // namespace fedshard::nn
