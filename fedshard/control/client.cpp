#include "fedshard/control/client.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>
#include <zmq.hpp>

#include "fedshard/base/error.h"
#include "fedshard/control/io_thread.h"
#include "fedshard/control/membership.h"
#include "fedshard/metrics/records.h"

namespace fedshard::control {
namespace {

using Time = std::chrono::steady_clock::time_point;
using base::ExitStatus;
using base::fail;

constexpr int kLingerMs = 1000;

Time in_seconds(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

[[noreturn]] void throw_abort(const Abort& abort) {
  switch (static_cast<ExitStatus>(abort.status)) {
    case ExitStatus::failed:
      throw base::RunError(abort.reason);
    case ExitStatus::usage:
      throw base::UsageError(abort.reason);
    case ExitStatus::damaged:
      throw base::DamagedError(abort.reason);
    default:
      throw base::PeersLostError(abort.reason);
  }
}

}  // namespace

class CoordinatorClient::Line {
 public:
  explicit Line(ClientOptions options);
  ~Line() { close(std::nullopt); }

  const ClientOptions& options() const { return options_; }
  std::string who() const { return rank_name(options_.rank, options_.group); }
  void post(const Message& message);
  void close(const std::optional<Message>& last_word);
  void set_step(std::int64_t step) {
    const std::lock_guard lock(mutex_);
    position_.step = step;
  }
  void begin_collective(std::string_view name) {
    const std::lock_guard lock(mutex_);
    ++position_.collective;
    position_.collective_name = name;
  }
  std::int64_t collectives() const {
    const std::lock_guard lock(mutex_);
    return position_.collective;
  }
  std::optional<Abort> aborted() const {
    const std::lock_guard lock(mutex_);
    return abort_;
  }
  // Posts `question` and waits for an Answer.
  template <class Answer>
  Answer ask(const Message& question, double patience_s, std::string_view what);

 private:
  void run();
  void converse(zmq::socket_t& socket);
  void send_outbox(zmq::socket_t& socket);
  void receive_all(zmq::socket_t& socket);
  void receive(Message message);
  void lose(const std::string& reason, ExitStatus status);
  void leave_if_due();
  void judge_silence();
  std::chrono::milliseconds patience(Time next_heartbeat) const;

  ClientOptions options_;
  zmq::context_t context_{1};
  zmq::socket_t socket_;
  WakeUp wake_up_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<std::string> outbox_;
  std::optional<Message> answer_;
  std::optional<Abort> abort_;
  Heartbeat position_;
  bool closing_ = false;

  std::optional<Time> exit_at_;  // of the thread alone
  bool is_welcome_ = false;      // likewise
  int unanswered_ = 0;           // heartbeats, likewise
  std::mutex join_mutex_;
  std::thread thread_;
};

CoordinatorClient::Line::Line(ClientOptions options)
    : options_(std::move(options)), socket_(context_, zmq::socket_type::dealer) {
  socket_.set(zmq::sockopt::linger, kLingerMs);
  socket_.set(zmq::sockopt::routing_id, std::to_string(options_.rank));
  socket_.set(zmq::sockopt::curve_serverkey, options_.token.server_public());
  socket_.set(zmq::sockopt::curve_publickey, options_.token.client_public());
  socket_.set(zmq::sockopt::curve_secretkey, options_.token.client_secret());
  socket_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(kMaxFrameBytes));
  socket_.set(zmq::sockopt::ipv6, options_.endpoint.find('[') != std::string::npos);
  // A rank that talks faster than the coordinator listens keeps its words; it neither waits nor drops any.
  socket_.set(zmq::sockopt::sndhwm, 0);
  socket_.set(zmq::sockopt::rcvhwm, 0);
  try {
    socket_.connect(options_.endpoint);
  } catch (const zmq::error_t& e) {
    fail<base::UsageError>("{}: '{}' is no endpoint of a coordinator: {}", who(), options_.endpoint, e.what());
  }
  thread_ = start_io_thread([this] { run(); });
}

void CoordinatorClient::Line::post(const Message& message) {
  std::string frame = encode(message);
  {
    const std::lock_guard lock(mutex_);
    if (closing_) fail<base::RunError>("internal error: {} speaks to the coordinator after its last word", who());
    outbox_.push_back(std::move(frame));
  }
  wake_up_.notify();
}

void CoordinatorClient::Line::close(const std::optional<Message>& last_word) {
  {
    const std::lock_guard lock(mutex_);
    if (!closing_ && last_word) {
      outbox_.push_back(encode(position_));  // where it happened
      outbox_.push_back(encode(*last_word));
    }
    closing_ = true;
  }
  changed_.notify_all();
  wake_up_.notify();
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

template <class Answer>
Answer CoordinatorClient::Line::ask(const Message& question, double patience_s, std::string_view what) {
  {
    const std::lock_guard lock(mutex_);
    answer_.reset();
  }
  post(question);
  std::unique_lock lock(mutex_);
  const bool came = changed_.wait_until(lock, in_seconds(patience_s), [this] { return answer_ || abort_ || closing_; });
  // What has been committed is so for all, even where the run has ended since.
  const bool committed = std::is_same_v<Answer, Commit> && answer_;
  if (abort_ && !committed) throw_abort(*abort_);
  if (!came) {
    fail<base::PeersLostError>("{}: the coordinator at {} did not answer within {:g} s ({})", who(), options_.endpoint,
                               patience_s, what);
  }
  if (!answer_) fail<base::RunError>("{}: the line to the coordinator was closed ({})", who(), what);
  if (!std::holds_alternative<Answer>(*answer_)) {
    fail<base::RunError>("{}: the coordinator's answer does not fit ({})", who(), what);
  }
  return std::get<Answer>(*std::exchange(answer_, std::nullopt));
}

void CoordinatorClient::Line::run() {
  try {
    converse(socket_);
  } catch (const base::Error& e) {
    lose(e.what(), e.status());
  } catch (const std::exception& e) {
    lose(fmt::format("{}: the line to the coordinator broke: {}", who(), e.what()), ExitStatus::failed);
  }
  if (exit_at_) {  // nothing is left to do but that
    std::unique_lock lock(mutex_);
    const bool closed = changed_.wait_until(lock, *exit_at_, [this] { return closing_; });
    lock.unlock();
    if (!closed) leave_if_due();
  }
  socket_.close();  // both wait until what was sent has left, for at most the linger time
  context_.close();
}

void CoordinatorClient::Line::converse(zmq::socket_t& socket) {
  const auto interval = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(options_.heartbeat_s));
  Time next_heartbeat = std::chrono::steady_clock::now() + interval;
  while (true) {
    wait_readable({socket.handle()}, wake_up_, patience(next_heartbeat));
    bool closing = false;
    {
      const std::lock_guard lock(mutex_);
      closing = closing_;
      const Time now = std::chrono::steady_clock::now();
      if (!closing && now >= next_heartbeat) {
        outbox_.push_back(encode(position_));
        ++unanswered_;
        next_heartbeat = now + interval;
      }
    }
    send_outbox(socket);
    if (closing) return;
    receive_all(socket);
    judge_silence();
    leave_if_due();
  }
}

// Until it is welcome, a rank has its patience for joining.
void CoordinatorClient::Line::judge_silence() {
  if (!is_welcome_ || unanswered_ * options_.heartbeat_s <= options_.silence_s) return;
  unanswered_ = 0;
  lose(fmt::format("{}: the coordinator at {} has not answered for {:g} s: its process has ended or hangs, or its host "
                   "can't be reached",
                   who(), options_.endpoint, options_.silence_s),
       ExitStatus::peers_lost);
}

std::chrono::milliseconds CoordinatorClient::Line::patience(Time next_heartbeat) const {
  const Time next = exit_at_ ? std::min(next_heartbeat, *exit_at_) : next_heartbeat;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - std::chrono::steady_clock::now());
  return std::max(left, std::chrono::milliseconds(0));
}

void CoordinatorClient::Line::send_outbox(zmq::socket_t& socket) {
  std::vector<std::string> frames;
  {
    const std::lock_guard lock(mutex_);
    frames.swap(outbox_);
  }
  for (const std::string& frame : frames) {
    // There is no limit on what waits to be sent, so a socket that takes nothing has lost its other end for good.
    if (socket.send(zmq::buffer(frame), zmq::send_flags::dontwait)) continue;
    fail<base::UsageError>("{}: the coordinator at {} refused this rank: the run token is not its own", who(),
                           options_.endpoint);
  }
}

void CoordinatorClient::Line::receive_all(zmq::socket_t& socket) {
  zmq::message_t frame;
  while (socket.recv(frame, zmq::recv_flags::dontwait)) {
    std::string why;
    auto message = decode(frame.to_string_view(), why);
    if (!message)
      return lose(fmt::format("{}: the coordinator sent a frame that is not valid: {}", who(), why),
                  ExitStatus::failed);
    receive(std::move(*message));
  }
}

void CoordinatorClient::Line::receive(Message message) {
  std::optional<Abort> first_abort;
  unanswered_ = 0;
  if (std::holds_alternative<Alive>(message)) return;
  is_welcome_ = is_welcome_ || std::holds_alternative<Welcome>(message);
  {
    const std::lock_guard lock(mutex_);
    if (const auto* abort = std::get_if<Abort>(&message)) {
      if (!abort_) abort_ = first_abort = *abort;
    } else {
      answer_ = std::move(message);
    }
  }
  changed_.notify_all();
  if (!first_abort) return;
  if (options_.exit_on_abort_s) exit_at_ = in_seconds(*options_.exit_on_abort_s);
  if (options_.on_abort) options_.on_abort(*first_abort);
}

void CoordinatorClient::Line::lose(const std::string& reason, ExitStatus status) {
  receive(Abort{reason, static_cast<int>(status)});
}

void CoordinatorClient::Line::leave_if_due() {
  if (!exit_at_ || std::chrono::steady_clock::now() < *exit_at_) return;
  static std::atomic_flag leaving;
  if (leaving.test_and_set()) return;  // another rank of this process has said why
  const Abort abort = aborted().value();
  const std::string line = fmt::format("{} leaves: {}\n", who(), abort.reason);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  ::_exit(abort.status);
}

CoordinatorClient::CoordinatorClient(ClientOptions options) : line_(std::make_unique<Line>(std::move(options))) {
  const ClientOptions& o = line_->options();
  const Hello hello{o.rank, o.group, ::getpid(), host_name(), o.version, o.config_digest};
  line_->ask<Welcome>(hello, o.join_s, "waiting to join: is it running, and is the run token its own?");
}

CoordinatorClient::~CoordinatorClient() = default;

void CoordinatorClient::set_step(std::int64_t step) { line_->set_step(step); }
void CoordinatorClient::begin_collective(std::string_view name) { line_->begin_collective(name); }
std::int64_t CoordinatorClient::collectives() const { return line_->collectives(); }

void CoordinatorClient::record(nlohmann::json line) {
  base::require(line.is_object() && line.contains("kind") && line["kind"].is_string(),
                "a record must be an object with a kind");
  line_->post(Record{metrics::finite(std::move(line))});
}

RoundPlan CoordinatorClient::propose(std::int64_t round, std::int64_t steps, std::int64_t tokens, bool wants_stop) {
  return line_->ask<RoundPlan>(Proposal{round, line_->options().group, tokens, wants_stop, steps},
                               line_->options().answer_s,
                               fmt::format("round {}: waiting for all ranks to propose", round));
}

Commit CoordinatorClient::ready(std::int64_t round, std::int64_t epoch) {
  return line_->ask<Commit>(Ready{round, epoch}, line_->options().answer_s,
                            fmt::format("round {}: waiting for all ranks to be ready", round));
}

DigestResult CoordinatorClient::digest(std::int64_t round, std::uint64_t sum, const RoundMeasures& measures) {
  return line_->ask<DigestResult>(Digest{round, line_->options().group, sum, measures}, line_->options().answer_s,
                                  fmt::format("round {}: waiting for the digests of all ranks", round));
}

void CoordinatorClient::report_error(const std::string& message, int status) {
  line_->close(RankError{line_->options().rank, line_->options().group, message, status});
}

void CoordinatorClient::goodbye(int status) { line_->close(Goodbye{status}); }

std::optional<Abort> CoordinatorClient::aborted() const { return line_->aborted(); }

void CoordinatorClient::throw_if_aborted() const {
  if (const auto abort = aborted()) throw_abort(*abort);
}

}  // namespace fedshard::control
