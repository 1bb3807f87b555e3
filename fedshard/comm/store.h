// The key-value store over which the ranks of a run find one another. It serves start-up alone: connections of Gloo and
// the coordinator's address; nothing is read from it once training has begun.
// It knows no passwords. Under a launcher that is not ours the run token passes through it too, so whoever reaches its
// port while a run starts can join that run (docs/running.md).
#pragma once
#include <chrono>
#include <memory>
#include <string>

namespace c10d {
class Store;
}

namespace fedshard::comm {

class Store {
 public:
  // Serves the store on a socket (taken over) that listens at address:port, and is a client of it.
  static std::shared_ptr<Store> serve(int listening_fd, const std::string& address, int port,
                                      std::chrono::milliseconds timeout);
  // Connects to one that is served elsewhere. Throws PeersLostError naming the address where nobody answers in time.
  static std::shared_ptr<Store> connect(const std::string& address, int port, std::chrono::milliseconds timeout);

  void set(const std::string& key, const std::string& value);
  // Waits for the key; throws PeersLostError when it has not come before the time-out.
  std::string get(const std::string& key);

  // The c10d store below; for backends.
  c10d::Store& native() const;
  ~Store();

 private:
  struct Native;
  explicit Store(std::unique_ptr<Native> native);
  std::unique_ptr<Native> native_;
};

}  // namespace fedshard::comm
