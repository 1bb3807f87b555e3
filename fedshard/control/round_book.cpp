#include "fedshard/control/round_book.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <numeric>
#include <string>

#include "fedshard/base/error.h"

namespace fedshard::control {
namespace {

using base::fail;
using base::RunError;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// NaN wins, so that it is seen.
double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

const char* verb_of(RoundBook::Phase phase) {
  switch (phase) {
    case RoundBook::Phase::between:
      return "be between rounds";
    case RoundBook::Phase::proposing:
      return "propose";
    case RoundBook::Phase::exchanging:
      return "be ready";
    case RoundBook::Phase::comparing:
      return "send its digest";
  }
  return "?";
}

}  // namespace

RoundBook::RoundBook(const Membership& membership)
    : membership_(membership),
      arrived_(at(membership.ranks()), false),
      proposed_(at(membership.groups())),
      digests_(at(membership.ranks())) {}

std::vector<int> RoundBook::missing() const {
  std::vector<int> ranks;
  if (phase_ == Phase::between) return ranks;
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    if (!arrived_[at(rank)]) ranks.push_back(rank);
  }
  return ranks;
}

const char* RoundBook::due() const { return verb_of(phase_); }

void RoundBook::enter(Phase phase, double now) {
  phase_ = phase;
  phase_start_ = now;
  std::fill(arrived_.begin(), arrived_.end(), false);
}

bool RoundBook::all_arrived() const { return std::find(arrived_.begin(), arrived_.end(), false) == arrived_.end(); }

void RoundBook::arrive(int rank, Phase phase, std::int64_t round) {
  const std::string who = rank_name(rank, membership_.group_of(rank));
  if (phase != phase_ || round != plan_.round) {
    fail<RunError>("{} wants to {} for round {} while ranks are due to {} for round {}: the ranks are out of step", who,
                   verb_of(phase), round, verb_of(phase_), plan_.round);
  }
  if (arrived_[at(rank)]) fail<RunError>("{} wants to {} for round {} a second time", who, verb_of(phase), round);
  arrived_[at(rank)] = true;
}

std::optional<RoundPlan> RoundBook::propose(int rank, const Proposal& proposal, double now) {
  const int group = membership_.group_of(rank);
  if (phase_ == Phase::between) {
    const std::int64_t due = has_begun_ ? plan_.round + 1 : proposal.round;
    if (proposal.round != due) {
      fail<RunError>("{} proposes round {}, but round {} is due: the ranks are out of step", rank_name(rank, group),
                     proposal.round, due);
    }
    has_begun_ = true;
    plan_.round = due;
    plan_.stop = false;
    std::fill(proposed_.begin(), proposed_.end(), std::nullopt);
    enter(Phase::proposing, now);
  }
  arrive(rank, Phase::proposing, proposal.round);
  auto& of_group = proposed_[at(group)];
  if (of_group && (of_group->tokens != proposal.tokens || of_group->steps != proposal.steps)) {
    fail<RunError>(
        "round {}: {} counts {} tokens in {} steps since the last round, other ranks of its group count {} in {}",
        proposal.round, rank_name(rank, group), proposal.tokens, proposal.steps, of_group->tokens, of_group->steps);
  }
  of_group = proposal;
  plan_.stop = plan_.stop || proposal.wants_stop;
  if (!all_arrived()) return std::nullopt;
  plan_.participants.resize(at(membership_.groups()));
  std::iota(plan_.participants.begin(), plan_.participants.end(), 0);
  plan_.tokens.clear();
  plan_.steps.clear();
  for (const auto& theirs : proposed_) {
    plan_.tokens.push_back(theirs.value().tokens);
    plan_.steps.push_back(theirs->steps);
  }
  enter(Phase::exchanging, now);
  return plan_;
}

std::optional<Commit> RoundBook::ready(int rank, const Ready& ready, double now) {
  if (ready.epoch != plan_.epoch) {
    fail<RunError>("round {}: {} is ready in epoch {}, but the exchange is in epoch {}", ready.round,
                   rank_name(rank, membership_.group_of(rank)), ready.epoch, plan_.epoch);
  }
  arrive(rank, Phase::exchanging, ready.round);
  if (!all_arrived()) return std::nullopt;
  enter(Phase::comparing, now);
  return Commit{plan_.round, plan_.epoch, plan_.participants};
}

std::vector<std::uint64_t> RoundBook::group_digests() const {
  std::vector<std::uint64_t> sums(at(membership_.groups()), 0);
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    sums[at(membership_.group_of(rank))] += digests_[at(rank)].sum;  // modulo 2^64
  }
  return sums;
}

void RoundBook::compare(const std::vector<std::uint64_t>& digests) const {
  std::map<std::uint64_t, std::string> groups_by_digest;
  for (std::size_t group = 0; group < digests.size(); ++group) {
    std::string& groups = groups_by_digest[digests[group]];
    groups += fmt::format("{}{}", groups.empty() ? "" : ", ", group);
  }
  if (groups_by_digest.size() == 1) return;
  std::string text;
  for (const auto& [digest, groups] : groups_by_digest) {
    text += fmt::format("{}group {} has {:016x}", text.empty() ? "" : ", ", groups, digest);
  }
  fail<RunError>("round {}: the groups do not hold the same parameters after the exchange: the digest of {}",
                 plan_.round, text);
}

std::optional<DigestResult> RoundBook::digest(int rank, const Digest& digest, double now) {
  arrive(rank, Phase::comparing, digest.round);
  digests_[at(rank)] = digest;
  if (!all_arrived()) return std::nullopt;
  const auto sums = group_digests();
  compare(sums);
  enter(Phase::between, now);
  return DigestResult{plan_.round, sums.front()};
}

std::int64_t RoundBook::tokens() const {
  return std::accumulate(plan_.tokens.begin(), plan_.tokens.end(), std::int64_t{0});
}

metrics::RoundRecord RoundBook::record() const {
  const RoundMeasures& first = digests_[at(membership_.first_rank(plan_.participants.front()))].measures;
  metrics::RoundRecord record;
  record.step = first.step;
  record.round = plan_.round;
  record.participants = plan_.participants;
  record.steps = plan_.steps;
  record.weights = first.weights;
  record.left_out = first.left_out;
  record.fragment = first.fragment;
  record.drift.assign(plan_.participants.size(), 0);
  record.digest = fmt::format("{:016x}", group_digests().front());
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    const RoundMeasures& measures = digests_[at(rank)].measures;
    record.seconds = larger(measures.seconds, record.seconds);
    record.exposed_seconds = larger(measures.exposed_seconds, record.exposed_seconds);
    record.drift[at(membership_.group_of(rank))] += measures.drift_square;
  }
  for (double& d : record.drift) d = std::sqrt(d);
  if (!std::isnan(first.change_square)) add_changes(record);
  return record;
}

void RoundBook::add_changes(metrics::RoundRecord& record) const {
  std::vector<double> square(plan_.participants.size()), with_mean(square), mean_square(square);
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    const RoundMeasures& measures = digests_[at(rank)].measures;
    const std::size_t group = at(membership_.group_of(rank));
    square[group] += measures.change_square;
    with_mean[group] += measures.change_with_mean;
    mean_square[group] += measures.mean_change_square;
  }
  for (std::size_t group = 0; group < square.size(); ++group) {
    const double norms = std::sqrt(square[group]) * std::sqrt(mean_square[group]);
    record.change_norm.push_back(std::sqrt(square[group]));
    record.cosine.push_back(norms == 0 ? 0 : with_mean[group] / norms);  // of what has not moved: none
  }
}

metrics::TrafficRecord RoundBook::traffic() const {
  metrics::TrafficRecord record;
  for (const Digest& digest : digests_) record += digest.measures.traffic;
  record.step = digests_[at(membership_.first_rank(plan_.participants.front()))].measures.step;
  return record;
}

}  // namespace fedshard::control
