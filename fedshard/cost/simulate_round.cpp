// The part of simulate.h that is between groups.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "fedshard/base/error.h"
#include "fedshard/cost/simulate.h"
#include "fedshard/cost/timing.h"

namespace fedshard::cost {
namespace {

using topology::GroupShape;
using topology::Scheme;

// Of an element that is exchanged, one way, its moments included.
double bytes_of_element(const Job& job, const plan::UpdateRules& rules) {
  const auto& traffic = job.traffic;
  constexpr std::int64_t kMany = std::int64_t{1} << 22;  // whole blocks, so that their ends don't count
  double bytes = static_cast<double>(traffic.bytes_aggregate);
  if (traffic.compression.kind != plan::Compression::Kind::none) {
    bytes = static_cast<double>(plan::encoded_bytes(traffic.compression, kMany)) / kMany;
  }
  if (!traffic.average_moments) return bytes;
  const std::int64_t moments = plan::exchanged_moments(job.plan, rules);
  return bytes + 4.0 * static_cast<double>(moments) / static_cast<double>(job.plan.exchanged_numel());
}

// Elements of an exchange.
double exchanged_numel(const Job& job) {
  return static_cast<double>(job.plan.exchanged_numel()) / static_cast<double>(job.fragments);
}

// Ranks of a group that send to others: with `split` all, with `leader` one for each shard. With `naive` all send, each
// as much as a leader.
double senders(const GroupShape& group, Scheme scheme) { return scheme == Scheme::split ? group.ranks : group.shards; }

// Bytes between two cells in one direction, of the pair that has most. Each group sends each other one its G-th part of
// the model and gets the mean of it back.
double most_between_cells(const Job& job, const Machine& machine, double model_bytes) {
  std::map<int, double> groups_in_cell;  // in parts, for a group that lies in several
  for (int rank = 0; rank < job.layout.world(); ++rank) {
    const GroupShape& group = job.layout.group(job.layout.group_of(rank));
    groups_in_cell[machine.placement.cell_of(rank)] += 1.0 / group.ranks;
  }
  const double groups = job.layout.groups();
  double most = 0;
  for (auto a = groups_in_cell.begin(); a != groups_in_cell.end(); ++a) {
    for (auto b = std::next(a); b != groups_in_cell.end(); ++b) {
      most = std::max(most, a->second * b->second * 2 * model_bytes / groups);
    }
  }
  return most;
}

// What goes from group to group: each rank's messages in turn, all ranks at once.
double between_groups(const Job& job, const Machine& machine, double model_bytes) {
  const double groups = job.layout.groups();
  std::set<int> nodes, cells;
  for (int rank = 0; rank < job.layout.world(); ++rank) {
    nodes.insert(machine.placement.node_of(rank));
    cells.insert(machine.placement.cell_of(rank));
  }
  const bool leaves_nodes = nodes.size() > 1, leaves_cells = cells.size() > 1;
  const double bandwidth = leaves_nodes
                               ? machine[Key::network_bandwidth] * network_efficiency(machine, std::ssize(nodes))
                               : machine[Key::node_bandwidth];
  const double latency = machine[leaves_cells   ? Key::cell_latency
                                 : leaves_nodes ? Key::network_latency
                                                : Key::node_latency];
  double seconds = 0;
  for (const GroupShape& group : job.layout.shapes()) {
    const double sent = 2 * (groups - 1) / groups * model_bytes / senders(group, job.traffic.exchange.scheme);
    seconds = std::max(seconds, sent / bandwidth);
  }
  const double copies = job.traffic.exchange.scheme == Scheme::naive ? job.layout.group(0).replicas : 1;
  if (leaves_cells) {
    seconds = std::max(seconds, copies * most_between_cells(job, machine, model_bytes) / machine[Key::cell_bandwidth]);
  }
  return seconds + 2 * (groups - 1) * latency;
}

// What the replicas of a group hand to each other after it.
double inside_group(const Job& job, const Machine& machine, const GroupShape& group, const Lateness& late) {
  const Scheme scheme = job.traffic.exchange.scheme;
  if (group.replicas == 1 || scheme == Scheme::naive) return 0;
  const Path path = path_of(job.layout.replica_peers(group.first_rank), machine.placement);
  const double shard = exchanged_numel(job) * static_cast<double>(job.traffic.bytes_aggregate) / group.shards;
  if (scheme == Scheme::split) return ring_seconds(path, machine, 1, shard / group.replicas, group.shards, late);
  // A chain passes on pieces, so that the whole shard moves once over each link.
  const double hops = static_cast<double>(path.members - 1);
  return ring_seconds(path, machine, 1, shard / hops, group.shards, late);
}

// Steps that each group makes in a round, where a step takes it so long.
std::vector<std::int64_t> steps_of(const Job& job, const std::vector<StepTime>& steps) {
  std::vector<std::int64_t> counts;
  for (int g = 0; g < job.layout.groups(); ++g) {
    plan::SinceRound since;
    const std::int64_t tokens = job.rank_step_tokens() * job.layout.group(g).ranks;
    do {
      ++since.steps;
      since.tokens += tokens;
      since.seconds += steps[static_cast<std::size_t>(g)].total;
    } while (!plan::round_is_over(job.pace, g, since));
    counts.push_back(since.steps);
  }
  return counts;
}

StepTime mean_of(const std::vector<StepTime>& steps) {
  StepTime mean;
  const auto add = [&](double StepTime::*part) {
    for (const StepTime& step : steps) mean.*part += step.*part / static_cast<double>(steps.size());
  };
  for (double StepTime::*part :
       {&StepTime::total, &StepTime::compute, &StepTime::late, &StepTime::gather, &StepTime::reduce, &StepTime::replica,
        &StepTime::host, &StepTime::update, &StepTime::overhead}) {
    add(part);
  }
  return mean;
}

}  // namespace

double Simulator::exchange(Noise& noise) const {
  if (job_.layout.groups() == 1) return 0;
  const auto late = [&](std::int64_t n) { return machine_[Key::jitter] * noise.latest_of(n); };
  const double model_bytes = exchanged_numel(job_) * bytes_of_element(job_, rules_);
  double inside = 0;
  for (const GroupShape& group : job_.layout.shapes()) {
    inside = std::max(inside, inside_group(job_, machine_, group, late));
  }
  return machine_[Key::collective_base] + between_groups(job_, machine_, model_bytes) + late(job_.layout.groups()) +
         inside;
}

RoundTime Simulator::round(Noise& noise) const {
  RoundTime round;
  std::vector<double> ready;
  for (int g = 0; g < job_.layout.groups(); ++g) round.steps.push_back(step(g, noise));
  round.counts = job_.layout.groups() == 1 ? std::vector<std::int64_t>{1} : steps_of(job_, round.steps);
  for (int g = 0; g < job_.layout.groups(); ++g) {
    const auto at = static_cast<std::size_t>(g);
    std::vector<StepTime> steps = {round.steps[at]};
    if (noise.is_drawn()) {
      while (std::ssize(steps) < round.counts[at]) steps.push_back(step(g, noise));
    }
    round.steps[at] = mean_of(steps);
    ready.push_back(round.steps[at].total * static_cast<double>(round.counts[at]));
    round.tokens += round.counts[at] * job_.rank_step_tokens() * job_.layout.group(g).ranks;
  }
  double last = *std::max_element(ready.begin(), ready.end());
  // Groups that are alike on average differ in one round: lateness of K steps adds up as sqrt(K).
  if (!noise.is_drawn() && job_.layout.groups() > 1) {
    const double seconds = last / static_cast<double>(round.most_steps());
    last += machine_[Key::spread] * seconds * std::sqrt(static_cast<double>(round.most_steps())) *
            noise.latest_of(job_.layout.groups());
  }
  round.waiting = last - *std::min_element(ready.begin(), ready.end());
  const double beside = static_cast<double>(job_.delay) * last / static_cast<double>(round.most_steps());
  for (std::int64_t fragment = 0; fragment < job_.fragments; ++fragment) {
    const double seconds = exchange(noise);
    round.exchange += seconds;
    round.exposed += std::max(0.0, seconds - beside);
  }
  round.total = last + round.exposed;
  return round;
}

std::int64_t RoundTime::most_steps() const { return *std::max_element(counts.begin(), counts.end()); }

}  // namespace fedshard::cost
