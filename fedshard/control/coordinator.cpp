#include "fedshard/control/coordinator.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <zmq.hpp>

#include "fedshard/base/error.h"
#include "fedshard/base/parse.h"
#include "fedshard/control/io_thread.h"

namespace fedshard::control {
namespace {

using std::chrono::milliseconds;

constexpr int kLingerMs = 1000;
constexpr milliseconds kTick{50};        // how often deadlines are judged
constexpr milliseconds kQuiet{500};      // after stop(): nothing for so long means that all has arrived
constexpr milliseconds kFarewell{2000};  // ... but no longer than this in all
constexpr const char* kZapDomain = "fedshard";

std::vector<std::string> receive_parts(zmq::socket_t& socket) {
  std::vector<std::string> parts;
  zmq::message_t part;
  do {
    if (!socket.recv(part, zmq::recv_flags::dontwait)) break;
    parts.push_back(part.to_string());
  } while (part.more());
  return parts;
}

void send_parts(zmq::socket_t& socket, const std::vector<std::string>& parts) {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto more = i + 1 < parts.size() ? zmq::send_flags::sndmore : zmq::send_flags::none;
    socket.send(zmq::buffer(parts[i]), more | zmq::send_flags::dontwait);
  }
}

// The connection of rank 3 is named "3".
int rank_of(std::string_view name) { return base::parse_number<int>(name).value_or(-1); }

}  // namespace

class Coordinator::Server {
 public:
  explicit Server(CoordinatorOptions options);
  ~Server() { stop(); }

  const std::string& endpoint() const { return endpoint_; }
  CoordinatorStatus status() const {
    const std::lock_guard lock(mutex_);
    return status_;
  }
  bool wait_until_over(double seconds) const {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return over_; });
  }
  void stop();

 private:
  void run();
  void serve();
  bool serve_once(milliseconds patience);
  void admit();
  bool receive_one();
  void hand_out();
  void publish();
  double now() const { return options_.clock->now(); }

  base::SteadyClock steady_;
  CoordinatorOptions options_;
  zmq::context_t context_{1};
  zmq::socket_t gate_{context_, zmq::socket_type::rep};  // ZAP: judges the keys of connections
  zmq::socket_t router_{context_, zmq::socket_type::router};
  std::string endpoint_;
  CoordinatorState state_;  // of the thread alone
  WakeUp wake_up_;

  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable changed_;
  CoordinatorStatus status_;
  bool over_ = false;
  bool stopping_ = false;

  std::thread thread_;
};

Coordinator::Server::Server(CoordinatorOptions options)
    : options_(std::move(options)),
      state_(options_.group_sizes, options_.deadlines,
             (options_.clock = options_.clock != nullptr ? options_.clock : &steady_)->now()) {
  const std::string& address = options_.bind_address;
  status_ = state_.status();
  gate_.set(zmq::sockopt::linger, 0);
  gate_.bind("inproc://zeromq.zap.01");  // before the router: without a gate, every connection is let in
  router_.set(zmq::sockopt::linger, kLingerMs);
  router_.set(zmq::sockopt::curve_server, true);
  router_.set(zmq::sockopt::curve_secretkey, options_.token.server_secret());
  router_.set(zmq::sockopt::zap_domain, kZapDomain);
  router_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(kMaxFrameBytes));
  router_.set(zmq::sockopt::router_handover, true);  // a rank whose connection broke comes back under its name
  router_.set(zmq::sockopt::rcvhwm, 0);
  router_.set(zmq::sockopt::sndhwm, 0);
  const bool v6 = address.find(':') != std::string::npos;
  router_.set(zmq::sockopt::ipv6, v6);
  try {
    router_.bind(v6 ? fmt::format("tcp://[{}]:*", address) : fmt::format("tcp://{}:*", address));
  } catch (const zmq::error_t& e) {
    base::fail<base::UsageError>("the coordinator cannot listen on '{}': {}", address, e.what());
  }
  endpoint_ = router_.get(zmq::sockopt::last_endpoint);
  thread_ = start_io_thread([this] { run(); });
}

void Coordinator::Server::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_up_.notify();
  if (thread_.joinable()) thread_.join();
}

void Coordinator::Server::run() {
  try {
    serve();
  } catch (const std::exception& e) {
    state_.fail_locally(fmt::format("the coordinator failed: {}", e.what()), now());
  }
  publish();
  // Closing flushes what was sent, for at most the linger time.
  router_.close();
  gate_.close();
  context_.close();
}

void Coordinator::Server::serve() {
  const auto is_stopping = [this] {
    const std::lock_guard lock(mutex_);
    return stopping_;
  };
  while (!is_stopping()) serve_once(kTick);
  // What ranks sent before they left may still be on its way. A rank's last word is the end of it; one that was killed
  // has none, so silence must do. It is measured by the clock: waking up with nothing to read proves nothing.
  const auto start = std::chrono::steady_clock::now();
  auto heard = start;
  while (!state_.is_over()) {
    if (serve_once(kTick)) heard = std::chrono::steady_clock::now();
    const auto now = std::chrono::steady_clock::now();
    if (now - heard >= kQuiet || now - start >= kFarewell) return;
  }
}

// True where anything was received.
bool Coordinator::Server::serve_once(milliseconds patience) {
  wait_readable({router_.handle(), gate_.handle()}, wake_up_, patience);
  admit();
  bool received = false;
  while (receive_one()) received = true;
  // Only now: while this process was held up, words may have piled up that show that nobody is silent.
  state_.tick(now());
  hand_out();
  publish();
  return received;
}

// One request a new connection (RFC 27): the key that the other end has proven to hold must be the run token's.
void Coordinator::Server::admit() {
  while (true) {
    const auto request = receive_parts(gate_);
    if (request.empty()) return;
    std::string key;
    if (request.size() == 7 && request[5] == "CURVE" && request[6].size() == 32) {
      std::array<char, 41> text{};
      zmq_z85_encode(text.data(), reinterpret_cast<const std::uint8_t*>(request[6].data()), 32);
      key = text.data();
    }
    const bool admitted = key == options_.token.client_public() && request[2] == kZapDomain;
    if (!admitted) state_.refuse_client();
    const std::string id = request.size() > 1 ? request[1] : "";
    send_parts(gate_, {"1.0", id, admitted ? "200" : "400", admitted ? "OK" : "wrong run token", "", ""});
  }
}

bool Coordinator::Server::receive_one() {
  const auto parts = receive_parts(router_);
  if (parts.empty()) return false;
  const int rank = rank_of(parts.front());
  std::string why;
  if (parts.size() != 2) {
    state_.reject(fmt::format("connection '{}' sent a message of {} parts", rank, parts.size()));
  } else if (const auto message = decode(parts.back(), why)) {
    state_.receive(rank, *message, now());
  } else {
    state_.reject(fmt::format("connection '{}' sent a frame that is not valid: {}", rank, why));
  }
  return true;
}

void Coordinator::Server::hand_out() {
  for (const nlohmann::json& record : state_.take_records()) {
    try {
      if (options_.sink) options_.sink(record);
    } catch (const std::exception& e) {
      state_.fail_locally(fmt::format("a record cannot be kept: {}", e.what()), now());
    }
  }
  for (const auto& [rank, message] : state_.take_outgoing()) {
    send_parts(router_, {std::to_string(rank), encode(message)});
  }
}

void Coordinator::Server::publish() {
  {
    const std::lock_guard lock(mutex_);
    status_ = state_.status();
    over_ = state_.is_over();
  }
  changed_.notify_all();
}

Coordinator::Coordinator(CoordinatorOptions options) : server_(std::make_unique<Server>(std::move(options))) {}
Coordinator::~Coordinator() = default;
const std::string& Coordinator::endpoint() const { return server_->endpoint(); }
CoordinatorStatus Coordinator::status() const { return server_->status(); }
bool Coordinator::wait_until_over(double seconds) const { return server_->wait_until_over(seconds); }
void Coordinator::stop() { server_->stop(); }

}  // namespace fedshard::control
