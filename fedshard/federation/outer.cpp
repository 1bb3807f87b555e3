#include "fedshard/federation/outer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "fedshard/base/error.h"

namespace fedshard::federation {
namespace {

using plan::Outer;

void require_flat(const at::Tensor& tensor, std::int64_t numel, const char* what) {
  base::require(tensor.dim() == 1 && tensor.is_contiguous() && tensor.scalar_type() == at::kFloat &&
                    tensor.device().is_cpu() && tensor.numel() == numel,
                "the {} of an outer step must be {} contiguous fp32 numbers on the CPU", what, numel);
}

// direction(gradient, i): updates element i's moments and returns what lr is multiplied by.
template <class Direction>
void step_elements(double lr, double factor, at::Tensor& parameters, const at::Tensor& mean, Direction direction) {
  float* values = parameters.mutable_data_ptr<float>();
  const float* means = mean.const_data_ptr<float>();
  for (std::int64_t i = 0; i < parameters.numel(); ++i) {
    const double anchor = values[i], whole = anchor - means[i];
    const double step = lr * direction(factor * whole, i);
    if (lr == 0 && step == 0) continue;  // first, because +0 and -0 are equal: the anchor's sign must stay
    values[i] = step == whole && std::isfinite(whole) ? means[i] : static_cast<float>(anchor - step);
  }
}

// The direction uses the new momentum before its rounding to fp32: otherwise momentum 0 would not give the mean.
void momentum_step(const OuterOptions& options, double factor, at::Tensor& parameters, const at::Tensor& mean,
                   at::Tensor& moment) {
  float* m = moment.mutable_data_ptr<float>();
  const double momentum = options.momentum;
  const bool nesterov = options.outer == Outer::nesterov;
  step_elements(options.lr, factor, parameters, mean, [=](double gradient, std::int64_t i) {
    const double next = momentum * m[i] + gradient;
    m[i] = static_cast<float>(next);
    return nesterov ? gradient + momentum * next : next;
  });
}

// next_second(v, g^2)
template <class NextSecond>
void adaptive_step(const OuterOptions& options, double factor, at::Tensor& parameters, const at::Tensor& mean,
                   std::span<at::Tensor> moments, NextSecond next_second) {
  float *m = moments[0].mutable_data_ptr<float>(), *v = moments[1].mutable_data_ptr<float>();
  const double beta1 = options.beta1, tau = options.tau;
  step_elements(options.lr, factor, parameters, mean, [=](double gradient, std::int64_t i) {
    const double first = beta1 * m[i] + (1 - beta1) * gradient;
    const double second = next_second(static_cast<double>(v[i]), gradient * gradient);
    m[i] = static_cast<float>(first);
    v[i] = static_cast<float>(second);
    return first / (std::sqrt(second) + tau);
  });
}

double sign(double x) { return static_cast<double>(x > 0) - static_cast<double>(x < 0); }

}  // namespace

double clip_factor(const OuterOptions& options, double norm) {
  return options.max_norm == 0 || norm <= options.max_norm ? 1.0 : options.max_norm / norm;
}

void outer_step(const OuterOptions& options, at::Tensor& parameters, const at::Tensor& mean,
                std::span<at::Tensor> moments, double factor) {
  require_flat(parameters, parameters.numel(), "parameters");
  require_flat(mean, parameters.numel(), "mean");
  for (const at::Tensor& moment : moments) require_flat(moment, parameters.numel(), "moments");
  const int wanted = plan::outer_moments_of(options.outer);
  base::require(static_cast<int>(moments.size()) == wanted, "{} moments given, {} wanted", moments.size(), wanted);
  const double beta2 = options.beta2;
  switch (options.outer) {
    case Outer::fedavg:
      if (options.lr == 1 && factor == 1) {
        parameters.copy_(mean);
        return;
      }
      return step_elements(options.lr, factor, parameters, mean,
                           [](double gradient, std::int64_t) { return gradient; });
    case Outer::fedavgm:
    case Outer::nesterov:
      return momentum_step(options, factor, parameters, mean, moments[0]);
    case Outer::fedadam:
      return adaptive_step(options, factor, parameters, mean, moments,
                           [beta2](double v, double square) { return beta2 * v + (1 - beta2) * square; });
    case Outer::fedyogi:
      return adaptive_step(options, factor, parameters, mean, moments,
                           [beta2](double v, double square) { return v - (1 - beta2) * square * sign(v - square); });
    case Outer::fedadagrad:
      return adaptive_step(options, factor, parameters, mean, moments,
                           [](double v, double square) { return v + square; });
  }
}

}  // namespace fedshard::federation
