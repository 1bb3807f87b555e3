#include "fedshard/nn/ops/norm_linears.h"

#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>

#include "fedshard/nn/ops/rms_norm.h"

namespace fedshard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rows_of(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

struct NormLinears : torch::autograd::Function<NormLinears> {
  static constexpr std::size_t kBeforeMatrices = 4;  // inputs: eps, recompute, x, weight, then the matrices

  static variable_list forward(AutogradContext* ctx, double eps, bool recompute, const at::Tensor& x,
                               const at::Tensor& weight, at::TensorList matrices) {
    const at::Tensor scale = rms_norm_scale(x, eps);
    const at::Tensor normal = rms_norm_output(x, weight, scale);
    variable_list outputs;
    for (const at::Tensor& matrix : matrices) outputs.push_back(at::linear(normal, matrix));
    variable_list kept{x, weight, scale, recompute ? at::Tensor() : normal};
    kept.insert(kept.end(), matrices.begin(), matrices.end());
    ctx->save_for_backward(std::move(kept));
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &scale = saved[2];
    const at::Tensor normal = rows_of(saved[3].defined() ? saved[3] : rms_norm_output(x, weight, scale));
    const bool x_wanted = wanted(ctx, 0), weight_wanted = wanted(ctx, 1);
    const bool normal_wanted = x_wanted || weight_wanted;
    variable_list results(kBeforeMatrices + grads.size());
    at::Tensor normal_grad;
    // The last matrix first, each product rounded before it is added: autograd's order for separate operations, so that
    // bf16 gradients are transformers' to the bit.
    for (std::size_t i = grads.size(); i-- > 0;) {
      const at::Tensor grad = rows_of(grads[i]);
      const at::Tensor& matrix = saved[kBeforeMatrices + i];
      if (wanted(ctx, 2 + i)) results[kBeforeMatrices + i] = at::mm(grad.t(), normal);
      if (!normal_wanted) continue;
      if (normal_grad.defined()) {
        normal_grad.add_(at::mm(grad, matrix));
      } else {
        normal_grad = at::mm(grad, matrix);
      }
    }
    if (normal_wanted) {
      const RmsNormGradients norm =
          rms_norm_backward(normal_grad.view(x.sizes()), x, weight, scale, x_wanted, weight_wanted);
      results[2] = norm.x;
      results[3] = norm.weight;
    }
    return results;
  }

 private:
  // Autograd counts the tensors among the inputs only.
  static bool wanted(AutogradContext* ctx, std::size_t tensor) { return ctx->needs_input_grad(tensor); }
};

}  // namespace

std::vector<at::Tensor> norm_linears(const at::Tensor& x, const at::Tensor& weight, double eps,
                                     const std::vector<at::Tensor>& matrices, bool recompute) {
  return NormLinears::apply(eps, recompute, x, weight, at::TensorList(matrices));
}

std::vector<at::Tensor> norm_linears_reference(const at::Tensor& x, const at::Tensor& weight, double eps,
                                               const std::vector<at::Tensor>& matrices) {
  const at::Tensor normal = rms_norm_reference(x, weight, eps);
  std::vector<at::Tensor> outputs;
  for (const at::Tensor& matrix : matrices) outputs.push_back(at::linear(normal, matrix));
  return outputs;
}

}  // namespace fedshard::nn
