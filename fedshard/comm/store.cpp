#include "fedshard/comm/store.h"

#include <c10/util/Logging.h>

#include <cstdlib>
#include <future>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "fedshard/base/error.h"
#include "fedshard/comm/plain_words.h"

namespace fedshard::comm {

namespace {

// c10d logs each attempt to connect, with stack traces, although it throws in the end. Who sets its variable sees that.
void silence_c10d() {
  static std::once_flag once;  // the level is a plain global, and ranks may be threads
  std::call_once(once, [] {
    if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = 3;  // fatal alone
  });
}

}  // namespace

struct Store::Native {
  c10::intrusive_ptr<c10d::Store> store;
};

Store::Store(std::unique_ptr<Native> native) : native_(std::move(native)) {}
Store::~Store() = default;

std::shared_ptr<Store> Store::serve(int listening_fd, const std::string& address, int port,
                                    std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.masterListenFd = listening_fd;
  silence_c10d();
  try {
    return std::shared_ptr<Store>(
        new Store(std::make_unique<Native>(Native{c10::make_intrusive<c10d::TCPStore>(address, options)})));
  } catch (const std::exception& e) {
    base::fail<base::RunError>("cannot serve the store at {}:{}: {}", address, port, plain_words(e));
  }
}

std::shared_ptr<Store> Store::connect(const std::string& address, int port, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  silence_c10d();
  // On a thread of its own, which may outlive this call: c10d waits without end where something else listens there.
  std::packaged_task<c10::intrusive_ptr<c10d::Store>()> task(
      [address, options] { return c10::make_intrusive<c10d::TCPStore>(address, options); });
  auto connected = task.get_future();
  std::thread(std::move(task)).detach();
  std::string reason = fmt::format("nothing heard within {:g} s", 2e-3 * static_cast<double>(timeout.count()));
  try {
    if (connected.wait_for(2 * timeout) == std::future_status::ready) {
      return std::shared_ptr<Store>(new Store(std::make_unique<Native>(Native{connected.get()})));
    }
  } catch (const std::exception& e) {
    reason = plain_words(e);
  }
  base::fail<base::PeersLostError>(
      "no store answers at {}:{}: {}; is rank 0 running there, and is that its MASTER_ADDR and MASTER_PORT?", address,
      port, reason);
}

void Store::set(const std::string& key, const std::string& value) { native().set(key, value); }

std::string Store::get(const std::string& key) {
  try {
    return native().get_to_str(key);
  } catch (const std::exception& e) {
    base::fail<base::PeersLostError>("'{}' did not appear in the store: {}", key, plain_words(e));
  }
}

c10d::Store& Store::native() const { return *native_->store; }

}  // namespace fedshard::comm
