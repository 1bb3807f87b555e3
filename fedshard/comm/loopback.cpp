#include "fedshard/comm/loopback.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::comm {

// Mailboxes by (communicator, sender, receiver), the latter two as world ranks.
struct LoopbackWorld::Shared {
  using Address = std::tuple<std::string, int, int>;
  std::chrono::milliseconds deadline{};
  std::mutex mutex;
  std::condition_variable arrived;
  std::map<Address, std::deque<std::vector<std::byte>>> mailboxes;
  bool broken = false;
};

namespace {

using Shared = LoopbackWorld::Shared;

class SentRequest final : public Request {
 public:
  void wait() override {}
};

class ReceiveRequest final : public Request {
 public:
  ReceiveRequest(std::shared_ptr<Shared> shared, Shared::Address address, void* data, std::size_t bytes)
      : shared_(std::move(shared)), address_(std::move(address)), data_(data), bytes_(bytes) {}

  void wait() override {
    std::unique_lock lock(shared_->mutex);
    auto& box = shared_->mailboxes[address_];
    const bool came =
        shared_->arrived.wait_for(lock, shared_->deadline, [&] { return shared_->broken || !box.empty(); });
    if (shared_->broken) base::fail<base::PeersLostError>("the connection is broken");
    if (!came) base::fail<base::PeersLostError>("no message within {} ms", shared_->deadline.count());
    const std::vector<std::byte> message = std::move(box.front());
    box.pop_front();
    base::require(message.size() == bytes_, "a message of {} bytes came where {} were expected", message.size(),
                  bytes_);
    std::memcpy(data_, message.data(), bytes_);
  }

 private:
  std::shared_ptr<Shared> shared_;
  Shared::Address address_;
  void* data_;
  std::size_t bytes_;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<Shared> shared, Members members)
      : shared_(std::move(shared)), members_(std::move(members)) {}

  std::unique_ptr<Request> send(const void* data, std::size_t bytes, int to) override {
    const auto* begin = static_cast<const std::byte*>(data);
    {
      const std::lock_guard lock(shared_->mutex);
      if (shared_->broken) base::fail<base::PeersLostError>("the connection is broken");
      shared_->mailboxes[{members_.name, members_.rank(), members_.ranks[to]}].emplace_back(begin, begin + bytes);
    }
    shared_->arrived.notify_all();
    return std::make_unique<SentRequest>();
  }

  std::unique_ptr<Request> receive(void* data, std::size_t bytes, int from) override {
    return std::make_unique<ReceiveRequest>(
        shared_, Shared::Address{members_.name, members_.ranks[from], members_.rank()}, data, bytes);
  }

 private:
  std::shared_ptr<Shared> shared_;
  Members members_;
};

class LoopbackBackend final : public Backend {
 public:
  LoopbackBackend(std::shared_ptr<Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}
  std::unique_ptr<Transport> connect(const Members& members) override {
    base::require(members.rank() == rank_, "rank {} connects as rank {}", rank_, members.rank());
    return std::make_unique<LoopbackTransport>(shared_, members);
  }

 private:
  std::shared_ptr<Shared> shared_;
  int rank_;
};

}  // namespace

LoopbackWorld::LoopbackWorld(std::chrono::milliseconds deadline) : shared_(std::make_shared<Shared>()) {
  shared_->deadline = deadline;
}
LoopbackWorld::~LoopbackWorld() = default;

std::unique_ptr<Backend> LoopbackWorld::backend(int rank) { return std::make_unique<LoopbackBackend>(shared_, rank); }

void LoopbackWorld::break_down() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->broken = true;
  }
  shared_->arrived.notify_all();
}

}  // namespace fedshard::comm
