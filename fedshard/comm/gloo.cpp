#include "fedshard/comm/gloo.h"

#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <set>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/comm/plain_words.h"

namespace fedshard::comm {
namespace {

class GlooRequest final : public Request {
 public:
  explicit GlooRequest(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  void wait() override { work_->wait(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(c10::intrusive_ptr<c10d::ProcessGroupGloo> group) : group_(std::move(group)) {}

  std::unique_ptr<Request> send(const void* data, std::size_t bytes, int to) override {
    auto parcel = parcel_of(const_cast<void*>(data), bytes);
    return std::make_unique<GlooRequest>(group_->send(parcel, to, kTag));
  }

  std::unique_ptr<Request> receive(void* data, std::size_t bytes, int from) override {
    auto parcel = parcel_of(data, bytes);
    return std::make_unique<GlooRequest>(group_->recv(parcel, from, kTag));
  }

 private:
  // One tag: Gloo keeps messages of one tag between two ranks in order.
  static constexpr int kTag = 0;

  static std::vector<at::Tensor> parcel_of(void* data, std::size_t bytes) {
    return {at::from_blob(data, {static_cast<std::int64_t>(bytes)}, at::kByte)};
  }

  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
};

class GlooBackend final : public Backend {
 public:
  GlooBackend(std::shared_ptr<Store> store, GlooOptions options)
      : store_(std::move(store)), options_(std::move(options)) {}

  std::unique_ptr<Transport> connect(const Members& members) override {
    try {
      auto gloo = c10d::ProcessGroupGloo::Options::create(options_.deadline);
      gloo->devices.push_back(options_.interface.empty()
                                  ? c10d::ProcessGroupGloo::createDeviceForHostname(options_.address)
                                  : c10d::ProcessGroupGloo::createDeviceForInterface(options_.interface));
      gloo->threads = 1;  // for Gloo's own collectives, which we do not use
      auto prefixed = c10::make_intrusive<c10d::PrefixStore>(
          members.name, c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store_->native()));
      return std::make_unique<GlooTransport>(
          c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, members.index, members.size(), gloo));
    } catch (const std::exception& e) {
      base::fail<base::PeersLostError>(
          "rank {}: cannot connect the {} ({} ranks{}): {}", members.rank(), members.name, members.size(),
          options_.interface.empty() ? "" : " over interface " + options_.interface, plain_words(e));
    }
  }

 private:
  std::shared_ptr<Store> store_;
  GlooOptions options_;
};

}  // namespace

std::unique_ptr<Backend> make_gloo_backend(std::shared_ptr<Store> store, GlooOptions options) {
  return std::make_unique<GlooBackend>(std::move(store), std::move(options));
}

void require_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    base::fail<base::RunError>("cannot list the network interfaces: {}", std::strerror(errno));
  }
  std::set<std::string> names;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const bool has_ip =
        entry->ifa_addr != nullptr && (entry->ifa_addr->sa_family == AF_INET || entry->ifa_addr->sa_family == AF_INET6);
    if (has_ip) names.insert(entry->ifa_name);
  }
  ::freeifaddrs(list);
  if (names.contains(name)) return;
  base::fail<base::UsageError>("[comm] interface '{}' is none of this machine's with an address: {}", name,
                               fmt::join(names, ", "));
}

std::string address_towards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0) {
    base::fail<base::UsageError>("cannot resolve '{}': {}", host, ::gai_strerror(error));
  }
  std::string address;
  // Connecting a datagram socket sends nothing but makes the kernel choose the route, and so the local address.
  if (const int fd = ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0); fd >= 0) {
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    char text[NI_MAXHOST] = "";
    if (::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) ==
            0) {
      address = text;
    }
    ::close(fd);
  }
  ::freeaddrinfo(found);
  if (address.empty())
    base::fail<base::UsageError>("no route to '{}'; name a network interface in [comm] interface", host);
  return address;
}

}  // namespace fedshard::comm
