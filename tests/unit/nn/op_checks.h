// Compares an operation with its reference: the output and every input's gradient, in fp32 and bf16.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <vector>

namespace fedshard::nn {

using Tensors = std::vector<at::Tensor>;
using Operation = std::function<at::Tensor(const Tensors&)>;

inline at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return at::randn(shape, at::TensorOptions().dtype(at::kFloat)).to(dtype);
}

inline double error(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) return 0.0;
  const at::Tensor wide = b.to(at::kDouble);
  return ((a.to(at::kDouble) - wide).abs().max() / wide.abs().max().clamp_min(1e-30)).item<double>();
}

// The output and the gradients of all inputs for one fixed random output gradient.
inline Tensors run(const Operation& operation, const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  const at::Tensor output = operation(leaves);
  at::manual_seed(3);
  const at::Tensor grad = at::randn(output.sizes(), at::TensorOptions().dtype(at::kFloat)).to(output.scalar_type());
  torch::autograd::backward({output}, {grad});
  Tensors results{output.detach()};
  for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

inline void expect_close(const Tensors& ours, const Tensors& reference, double tolerance) {
  ASSERT_EQ(ours.size(), reference.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(ours[i].sizes(), reference[i].sizes());
    EXPECT_EQ(ours[i].scalar_type(), reference[i].scalar_type());
    EXPECT_LE(error(ours[i], reference[i]), tolerance) << (i == 0 ? "output" : "gradient of input ") << i;
  }
}

inline void expect_equal(const Tensors& ours, const Tensors& reference) {
  ASSERT_EQ(ours.size(), reference.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(at::equal(ours[i], reference[i])) << (i == 0 ? "output" : "gradient of input ") << i;
  }
}

inline Tensors rounded(const Tensors& inputs) {
  Tensors result;
  for (const at::Tensor& input : inputs) result.push_back(input.to(at::kBFloat16));
  return result;
}

// fp32 agrees to rounding; with bf16 inputs, bf16 outputs are equal to the bit and gradients within a few roundings of
// 2^-9.
inline void compare(const Operation& ours, const Operation& reference, const Tensors& inputs) {
  expect_close(run(ours, inputs), run(reference, inputs), 3e-6);
  const Tensors a = run(ours, rounded(inputs));
  const Tensors b = run(reference, rounded(inputs));
  EXPECT_LE(error(a[0], b[0]), a[0].scalar_type() == at::kBFloat16 ? 0.0 : 3e-6);
  expect_close(a, b, 0x1p-6);
}

}  // namespace fedshard::nn
