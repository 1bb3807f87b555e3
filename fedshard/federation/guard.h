// Which groups may take part in an average: one that brings numbers that are not finite, or a change far larger than
// the others', would spoil it for all.
//
// A surprise: the judgement needs no vote. Every rank sees the same sums of every group, so all come to the same one.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

namespace fedshard::federation {

// What a group brings, summed over its ranks.
struct Contribution {
  double square = 0;             // squared norm; not finite where any element is not
  bool replicas_differ = false;  // so that nobody can say what the group's model is
};

// By group: why it is left out, or nothing where it is sound. `limit`: how many times the median of the other groups'
// norms a group's may be; groups that are left out for other reasons are not among the others. 0: any finite norm is
// sound, and so it is where that median is 0.
std::vector<std::string> faults_of(std::span<const Contribution> contributions, double limit);

// Whether all elements are finite numbers. Takes no memory to speak of.
bool all_finite(const at::Tensor& values);

}  // namespace fedshard::federation
