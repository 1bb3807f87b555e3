#include "fedshard/comm/store.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "fedshard/base/error.h"

namespace fedshard::comm {

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
  try {
    return std::shared_ptr<Store>(
        new Store(std::make_unique<Native>(Native{c10::make_intrusive<c10d::TCPStore>(address, options)})));
  } catch (const std::exception& e) {
    base::fail<base::RunError>("cannot serve the store at {}:{}: {}", address, port, e.what());
  }
}

std::shared_ptr<Store> Store::connect(const std::string& address, int port, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return std::shared_ptr<Store>(
        new Store(std::make_unique<Native>(Native{c10::make_intrusive<c10d::TCPStore>(address, options)})));
  } catch (const std::exception& e) {
    base::fail<base::PeersLostError>("no store answers at {}:{} (MASTER_ADDR, MASTER_PORT): {}", address, port,
                                     e.what());
  }
}

void Store::set(const std::string& key, const std::string& value) { native().set(key, value); }

std::string Store::get(const std::string& key) {
  try {
    return native().get_to_str(key);
  } catch (const std::exception& e) {
    base::fail<base::PeersLostError>("'{}' did not appear in the store: {}", key, e.what());
  }
}

c10d::Store& Store::native() const { return *native_->store; }

}  // namespace fedshard::comm
