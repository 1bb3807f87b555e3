#include "fedshard/nn/ops/rms_norm.h"

#include <torch/csrc/autograd/custom_function.h>

namespace fedshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// With r = rsqrt(mean(x^2) + eps), n = x r and g = grad * weight:
//   grad_x = r (g - n mean(g n)),   grad_weight = sum over rows of grad * n.
struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, double eps) {
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor scale = at::rsqrt(at::mean(wide * wide, -1, /*keepdim=*/true) + eps);
    ctx->save_for_backward({x, weight, scale});
    return weight * (wide * scale).to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &scale = saved[2];
    const at::Tensor& grad = grads[0];
    const at::Tensor normal = x.to(at::kFloat) * scale;
    at::Tensor grad_x;
    at::Tensor grad_weight;
    if (ctx->needs_input_grad(1)) {
      const at::Tensor products = grad * normal.to(x.scalar_type());
      grad_weight = products.reshape({-1, weight.numel()}).sum(0);
    }
    if (ctx->needs_input_grad(0)) {
      at::Tensor wide = (grad * weight).to(at::kFloat);
      wide = wide - normal * at::mean(wide * normal, -1, /*keepdim=*/true);
      grad_x = (wide * scale).to(x.scalar_type());
    }
    return {grad_x, grad_weight, at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return RmsNorm::apply(x, weight, eps);
}

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor variance = at::mean(at::square(wide), -1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + eps)).to(x.scalar_type());
}

}  // namespace fedshard::nn
