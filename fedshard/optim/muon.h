// Muon: the update of a matrix is its averaged gradient, made (nearly) orthogonal.
//
// The one update that a shard cannot make by itself. Each unit's averaged gradients are gathered whole, and a rank then
// orthogonalises the matrices that its own shard touches: a matrix cut into three is computed three times, which costs
// less than a second exchange would.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "fedshard/comm/communicator.h"
#include "fedshard/optim/segments.h"
#include "fedshard/optim/workplace.h"
#include "fedshard/shard/engine.h"

namespace fedshard::optim {

struct MuonOptions {
  double momentum = 0.95;  // the part of the average that stays at a step
  bool nesterov = true;
};

// matrix: [m, n] fp32. Returns [m, n] bf16 of the same row and column spaces, with singular values of about 1 (0.5 to
// 1.5): five steps of the quintic Newton-Schulz iteration in bf16 (Jordan, https://kellerjordan.github.io/posts/muon/;
// torch.optim.Muon does the same arithmetic). A zero matrix stays zero.
at::Tensor orthogonalize(const at::Tensor& matrix);

class Muon {
 public:
  // exp_avg: averages of the gradients of at least Muon's matrices, on the device of `place`. Matrices are gathered and
  // orthogonalised on the engine's device. The references must outlive it.
  Muon(MuonOptions options, const plan::UpdateRules& rules, shard::Engine& engine, const Workplace& place,
       const shard::Arena& exp_avg, comm::Communicator& shard_axis);

  // As torch.optim.Muon with adjust_lr_fn = "match_rms_adamw" (Liu et al., arXiv 2502.16982): average the gradient,
  // decay the parameters by lr * weight_decay, subtract the orthogonalised average times lr * 0.2 sqrt(max(m, n)), so
  // that one lr serves AdamW too. Collective over the shard axis where the unit has a matrix of Muon's: sends
  // (F-1) ceil(N_u/F) 4 bytes a rank, counted as `gather`. The same bits for every shard count. To be called between
  // begin(unit) and end(unit) of the workplace.
  void step(int unit, double lr);

 private:
  struct Matrix {
    std::int64_t begin = 0;  // its first element within the unit
    std::int64_t rows = 0, columns = 0;
    Segment held;  // this rank's part of it
    at::Tensor parameters, gradients, exp_avg;
  };
  // Gathers what is to be orthogonalised; returns the whole unit, of which only Muon's matrices have a meaning.
  at::Tensor gather(int unit);

  MuonOptions options_;
  const shard::ArenaMap& map_;
  comm::Communicator& shard_axis_;
  std::vector<bool> gathers_;                  // by unit; alike on all ranks
  std::vector<std::vector<Matrix>> matrices_;  // by unit, those that this rank holds elements of
  at::Tensor buffer_;                          // [F * shard_numel] of the largest unit that gathers, fp32
};

}  // namespace fedshard::optim
