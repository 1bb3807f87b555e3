#include "fedshard/optim/muon.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace fedshard::optim {

at::Tensor orthogonalize(const at::Tensor& matrix) {
  // The quintic whose slope at zero is steepest; it need not converge to 1.
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315, kEps = 1e-7;
  constexpr int kSteps = 5;
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = matrix.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true);
  if (tall) x = x.t();
  x.div_(at::linalg_vector_norm(x).clamp_min(kEps));
  for (int i = 0; i < kSteps; ++i) {
    at::Tensor gram = at::mm(x, x.t());
    const at::Tensor update = at::addmm(gram, gram, gram, kB, kC);
    gram.reset();
    x = at::addmm(x, update, x, kA);
  }
  return tall ? x.t() : x;
}

Muon::Muon(MuonOptions options, const plan::UpdateRules& rules, shard::Engine& engine, const Workplace& place,
           const shard::Arena& exp_avg, comm::Communicator& shard_axis)
    : options_(options), map_(engine.map()), shard_axis_(shard_axis), matrices_(map_.units()) {
  std::int64_t largest = 0;
  for (int u = 0; u < map_.units(); ++u) {
    const plan::UnitSpec& unit = engine.plan().units[u];
    gathers_.push_back(std::any_of(rules[u].begin(), rules[u].end(),
                                   [](const plan::UpdateRule& r) { return r.update == plan::Update::muon; }));
    if (gathers_.back()) largest = std::max(largest, map_.shards() * map_.shard_numel(u));
    for (const Segment& segment : segments_of(unit, rules[u], map_.range(u))) {
      if (segment.rule.update != plan::Update::muon) continue;
      const std::vector<std::int64_t>& shape = unit.parameters[segment.parameter].shape;
      matrices_[u].push_back({unit.offset_of(segment.parameter), shape[0], shape[1], segment,
                              place.parameters(u, segment.range), place.gradients(u, segment.range),
                              exp_avg.slice(u, segment.range)});
    }
  }
  buffer_ = at::zeros({largest}, at::TensorOptions().dtype(at::kFloat).device(engine.device()));
}

at::Tensor Muon::gather(int unit) {
  const at::Tensor whole = buffer_.narrow(0, 0, map_.shards() * map_.shard_numel(unit));
  for (const Matrix& matrix : matrices_[unit]) {
    matrix.exp_avg.lerp_(matrix.gradients, 1 - options_.momentum);
    const at::Tensor mine = whole.narrow(0, matrix.held.range.begin, matrix.held.range.size());
    // In place: the gradient has served.
    mine.copy_(options_.nesterov ? matrix.gradients.lerp_(matrix.exp_avg, options_.momentum) : matrix.exp_avg);
  }
  shard_axis_.all_gather(whole, comm::Purpose::gather)->wait();
  return whole;
}

void Muon::step(int unit, double lr) {
  if (!gathers_[unit]) return;
  const at::Tensor whole = gather(unit);
  for (const Matrix& matrix : matrices_[unit]) {
    const at::Tensor update = whole.narrow(0, matrix.begin, matrix.rows * matrix.columns);
    const at::Tensor shaped = update.view({matrix.rows, matrix.columns});
    // Its place in the buffer has served, so the result needs no other.
    shaped.copy_(orthogonalize(shaped));
    const double rate = lr * matrix.held.rule.lr_factor;
    const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(matrix.rows, matrix.columns)));
    matrix.parameters.mul_(1 - rate * matrix.held.rule.weight_decay);
    const at::Tensor held = whole.narrow(0, matrix.held.range.begin, matrix.held.range.size());
    matrix.parameters.sub_(held.to(matrix.parameters.device()), rate * scale);
  }
}

}  // namespace fedshard::optim
