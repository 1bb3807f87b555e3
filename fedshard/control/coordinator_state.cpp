#include "fedshard/control/coordinator_state.h"

#include <cstddef>
#include <map>
#include <tuple>
#include <variant>

#include "fedshard/base/error.h"

namespace fedshard::control {
namespace {

using base::ExitStatus;

std::size_t at(int index) { return static_cast<std::size_t>(index); }
constexpr int kFailed = static_cast<int>(ExitStatus::failed);
constexpr int kUsage = static_cast<int>(ExitStatus::usage);
constexpr int kPeersLost = static_cast<int>(ExitStatus::peers_lost);
constexpr int kStopped = static_cast<int>(ExitStatus::stopped);

}  // namespace

CoordinatorState::CoordinatorState(const std::vector<int>& group_sizes, const Deadlines& deadlines, double now)
    : deadlines_(deadlines),
      start_(now),
      membership_(group_sizes),
      last_heard_(at(membership_.ranks()), now),
      positions_(at(membership_.ranks())) {
  status_.latest_step.resize(at(membership_.groups()));
}

bool CoordinatorState::is_present(int rank) const {
  const RankState state = membership_.state(rank);
  return state == RankState::joined || state == RankState::training;
}

void CoordinatorState::reject(const std::string& why) {
  ++status_.rejected_frames;
  status_.last_rejection = why;
}

void CoordinatorState::send_to_present(const Message& message) {
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    if (is_present(rank)) outgoing_.emplace_back(rank, message);
  }
}

void CoordinatorState::receive(int rank, const Message& message, double now) {
  if (rank < 0 || rank >= membership_.ranks()) {
    return reject(fmt::format("rank {} is not one of the {} of this run", rank, membership_.ranks()));
  }
  if (!std::holds_alternative<Hello>(message) && !is_present(rank)) {
    return reject(fmt::format("{} spoke while it is {}", who(rank), name_of(membership_.state(rank))));
  }
  last_heard_[at(rank)] = now;
  try {
    std::visit([&](const auto& m) { on(rank, m, now); }, message);
  } catch (const base::RunError& e) {  // ranks contradict each other
    end_run({-1, -1, e.what(), kFailed}, e.what(), kFailed, now);
  }
}

void CoordinatorState::on(int rank, const Hello& hello, double now) {
  if (abort_) {
    outgoing_.emplace_back(rank, *abort_);
    return;
  }
  const auto refuse = [&](const std::string& why) {
    end_run({rank, membership_.group_of(rank), why, kUsage}, why, kUsage, now);
    outgoing_.emplace_back(rank, *abort_);
  };
  if (membership_.state(rank) != RankState::expected) {
    return refuse(fmt::format("{} joined twice, now as process {} on {}: two processes hold the same place", who(rank),
                              hello.pid, hello.host));
  }
  if (hello.rank != rank || hello.group != membership_.group_of(rank)) {
    return refuse(fmt::format("rank {} takes itself for {}: the ranks were started with different layouts", rank,
                              rank_name(hello.rank, hello.group)));
  }
  if (!first_hello_) first_hello_ = hello;
  if (hello.version != first_hello_->version) {
    return refuse(fmt::format("{} on {} runs version {}, rank {} on {} runs {}: start all ranks from one program",
                              who(rank), hello.host, hello.version, first_hello_->rank, first_hello_->host,
                              first_hello_->version));
  }
  if (hello.config_digest != first_hello_->config_digest) {
    return refuse(
        fmt::format("{} on {} has another configuration than rank {} on {}: give all ranks the same file, the "
                    "same --set and the same number of ranks",
                    who(rank), hello.host, first_hello_->rank, first_hello_->host));
  }
  membership_.move(rank, RankState::joined);
  outgoing_.emplace_back(rank, Welcome{});
}

void CoordinatorState::begins_training(int rank, double now) {
  if (membership_.state(rank) == RankState::joined) membership_.move(rank, RankState::training);
  if (tokens_counted_from_ < 0) tokens_counted_from_ = now;
}

void CoordinatorState::on(int rank, const Heartbeat& heartbeat, double now) {
  positions_[at(rank)] = heartbeat;
  outgoing_.emplace_back(rank, Alive{});
  if (heartbeat.step > 0 || heartbeat.collective > 0) begins_training(rank, now);
}

void CoordinatorState::on(int rank, const Record& record, double now) {
  begins_training(rank, now);
  nlohmann::json line = record.line;
  line["time_s"] = now - start_;
  if (line["kind"] == "step") status_.latest_step[at(membership_.group_of(rank))] = line;
  records_.push_back(std::move(line));
}

void CoordinatorState::on(int rank, const Proposal& proposal, double now) {
  if (abort_) return;
  begins_training(rank, now);
  if (const auto ended = membership_.in_state(RankState::ended); !ended.empty()) {
    base::fail<base::RunError>("{} proposes round {}, but {} has already ended", who(rank), proposal.round,
                               list_ranks(ended));
  }
  if (const auto plan = rounds_.propose(rank, proposal, now)) send_to_present(*plan);
}

void CoordinatorState::on(int rank, const Ready& ready, double now) {
  if (abort_) return;
  if (const auto commit = rounds_.ready(rank, ready, now)) send_to_present(*commit);
}

void CoordinatorState::on(int rank, const Digest& digest, double now) {
  if (abort_) return;
  if (const auto result = rounds_.digest(rank, digest, now)) complete_round(*result, now);
}

void CoordinatorState::complete_round(const DigestResult& result, double now) {
  metrics::RoundRecord record = rounds_.record();
  const double seconds = now - tokens_counted_from_;
  record.time_s = now - start_;
  record.tokens_per_s = seconds > 0 ? static_cast<double>(rounds_.tokens()) / seconds : 0;
  tokens_counted_from_ = now;
  ++status_.rounds;
  records_.push_back(metrics::to_json(record));
  metrics::TrafficRecord traffic = rounds_.traffic();
  traffic.time_s = record.time_s;
  records_.push_back(metrics::to_json(traffic));
  send_to_present(result);
}

void CoordinatorState::on(int rank, const RankError& error, double now) {
  if (error.rank != rank) return reject(fmt::format("{} reports an error of rank {}", who(rank), error.rank));
  membership_.move(rank, RankState::failed);
  if (abort_) return;
  if (error.status != kPeersLost) {
    return end_run(error, fmt::format("{} failed: {}", who(rank), own_words(rank, error.group, error.message)),
                   kPeersLost, now);
  }
  if (echo_) return;
  echo_ = Echo{error, now};
  status_.first_error = error;
  status_.first_error_s = now - start_;
}

void CoordinatorState::on(int rank, const Goodbye& goodbye, double now) {
  if (goodbye.status != 0 && goodbye.status != kStopped) {
    return on(rank, RankError{rank, membership_.group_of(rank), "ended without saying why", goodbye.status}, now);
  }
  membership_.move(rank, RankState::ended);
  for (const int missing : rounds_.missing()) {
    if (missing != rank || abort_) continue;
    base::fail<base::RunError>("{} ended in the middle of round {}", who(rank), rounds_.round());
  }
}

void CoordinatorState::fail_locally(const std::string& message, double now) {
  if (!abort_) end_run({-1, -1, message, kFailed}, message, kFailed, now);
}

void CoordinatorState::end_run(const RankError& cause, const std::string& reason, int status, double now) {
  if (abort_) return;
  abort_ = Abort{reason, status};
  status_.aborted = true;
  status_.first_error = cause;
  status_.first_error_s = now - start_;
  echo_.reset();
  send_to_present(*abort_);
}

void CoordinatorState::tick(double now) {
  if (abort_) return;
  judge_echo(now);
  if (!abort_ && !echo_) judge_silence(now);
}

void CoordinatorState::judge_echo(double now) {
  if (!echo_) return;
  std::vector<int> quiet;
  bool others_left = false;
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    if (!is_present(rank)) continue;
    others_left = true;
    if (last_heard_[at(rank)] <= echo_->time) quiet.push_back(rank);
  }
  if (others_left && now - echo_->time < deadlines_.echo) return;
  RankError cause = echo_->report;
  std::string reason = fmt::format("{} lost its peers: {}; {}", who(cause.rank),
                                   own_words(cause.rank, cause.group, cause.message), whereabouts(cause.group));
  const auto blame = [&](const std::vector<int>& ranks, const std::string& what) {
    reason = fmt::format("{} {}; {}", list_ranks(ranks), what, reason);
    const int group = membership_.group_of(ranks.front());
    if (group != cause.group) reason += "; " + whereabouts(group);
    for (const int rank : ranks) membership_.move(rank, RankState::failed);
    cause = {ranks.front(), group, reason, kPeersLost};
  };
  const auto absent = membership_.in_state(RankState::expected);
  if (!quiet.empty()) {
    blame(quiet, "fell silent");
  } else if (!absent.empty()) {
    blame(absent, "did not join");
  }
  end_run(cause, reason, kPeersLost, now);
}

void CoordinatorState::judge_silence(double now) {
  const auto lose = [&](const std::vector<int>& lost, const std::string& what) {
    const int group = membership_.group_of(lost.front());
    const std::string reason = fmt::format("{} {}; {}", list_ranks(lost), what, whereabouts(group));
    // Told before they count as failed: a rank that is merely slow must learn that the run has ended.
    end_run({lost.front(), group, reason, kPeersLost}, reason, kPeersLost, now);
    for (const int rank : lost) membership_.move(rank, RankState::failed);
  };
  const auto expected = membership_.in_state(RankState::expected);
  if (!expected.empty() && now - start_ > deadlines_.join) {
    return lose(expected, fmt::format("did not join within {:g} s", deadlines_.join));
  }
  std::vector<int> silent;
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    if (is_present(rank) && now - last_heard_[at(rank)] > deadlines_.silence) silent.push_back(rank);
  }
  if (!silent.empty()) return lose(silent, fmt::format("sent nothing for {:g} s", deadlines_.silence));
  const auto missing = rounds_.missing();
  if (!missing.empty() && now - rounds_.phase_start() > deadlines_.round) {
    lose(missing, fmt::format("did not {} for round {} within {:g} s of the others", rounds_.due(), rounds_.round(),
                              deadlines_.round));
  }
}

// "in group 0, ranks 0, 1 are at collective 19 of step 4 (reduce block.2), rank 2 at 17 of step 4 (gather block.3)"
std::string CoordinatorState::whereabouts(int group) const {
  std::map<std::tuple<std::int64_t, std::int64_t, std::string>, std::vector<int>> places;
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    const Heartbeat& p = positions_[at(rank)];
    if (membership_.group_of(rank) == group) places[{p.collective, p.step, p.collective_name}].push_back(rank);
  }
  std::string text;
  for (auto place = places.rbegin(); place != places.rend(); ++place) {
    const auto& [collective, step, name] = place->first;
    text += fmt::format("{}{} last told of ", text.empty() ? fmt::format("in group {}, ", group) : ", ",
                        list_ranks(place->second));
    text += collective == 0 ? "no collective" : fmt::format("collective {} ({}) of step {}", collective, name, step);
  }
  return text;
}

CoordinatorStatus CoordinatorState::status() const {
  CoordinatorStatus status = status_;
  for (int rank = 0; rank < membership_.ranks(); ++rank) {
    const RankState state = membership_.state(rank);
    if (is_present(rank)) status.joined.push_back(rank);
    if (state == RankState::ended) status.ended.push_back(rank);
    if (state == RankState::failed) status.failed.push_back(rank);
  }
  return status;
}

}  // namespace fedshard::control
