#include "fedshard/nn/ops/rms_norm.h"

#include <torch/csrc/autograd/custom_function.h>

namespace fedshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, double eps) {
    const at::Tensor scale = rms_norm_scale(x, eps);
    ctx->save_for_backward({x, weight, scale});
    return rms_norm_output(x, weight, scale);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const RmsNormGradients result =
        rms_norm_backward(grads[0], saved[0], saved[1], saved[2], ctx->needs_input_grad(0), ctx->needs_input_grad(1));
    return {result.x, result.weight, at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm_scale(const at::Tensor& x, double eps) {
  const at::Tensor wide = x.to(at::kFloat);
  return at::rsqrt(at::mean(wide * wide, -1, /*keepdim=*/true) + eps);
}

at::Tensor rms_norm_output(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale) {
  return weight * (x.to(at::kFloat) * scale).to(x.scalar_type());
}

// With r = rsqrt(mean(x^2) + eps), n = x r and g = grad * weight:
//   grad_x = r (g - n mean(g n)),   grad_weight = sum over rows of grad * n.
RmsNormGradients rms_norm_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                                   const at::Tensor& scale, bool x_wanted, bool weight_wanted) {
  at::Tensor normal = x.to(at::kFloat) * scale;
  RmsNormGradients result;
  if (weight_wanted) {
    const at::Tensor products = grad * normal.to(x.scalar_type());
    result.weight = products.reshape({-1, weight.numel()}).sum(0);
  }
  if (x_wanted) {
    // In place where it can be: these are fp32 and as large as a stage's output.
    at::Tensor wide = (grad * weight).to(at::kFloat);
    const at::Tensor mean = at::mean(wide * normal, -1, /*keepdim=*/true);
    wide.sub_(normal.mul_(mean)).mul_(scale);
    result.x = wide.to(x.scalar_type());
  }
  return result;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return RmsNorm::apply(x, weight, eps);
}

at::Tensor rms_norm_reference(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor variance = at::mean(at::square(wide), -1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + eps)).to(x.scalar_type());
}

}  // namespace fedshard::nn
