#include "fedshard/nn/ops/swiglu.h"

#include <torch/csrc/autograd/custom_function.h>

namespace fedshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    return at::silu(gate).mul_(up);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1];
    at::Tensor grad_gate;
    at::Tensor grad_up;
    if (ctx->needs_input_grad(0)) grad_gate = at::silu_backward(grads[0] * up, gate);
    if (ctx->needs_input_grad(1)) grad_up = at::silu(gate).mul_(grads[0]);
    return {grad_gate, grad_up};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return SwiGlu::apply(gate, up); }

at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate) * up; }

}  // namespace fedshard::nn
