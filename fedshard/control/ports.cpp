#include "fedshard/control/ports.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::control {
namespace {

constexpr int kBacklog = 2048;  // every rank of a large world connects at once; the kernel caps it

int bound_port(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    base::fail<base::RunError>("cannot read the port of a bound socket: {}", std::strerror(errno));
  }
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(bound).sin_port);
}

}  // namespace

ListeningSocket::~ListeningSocket() {
  if (fd_ >= 0) ::close(fd_);
}

ListeningSocket::ListeningSocket(ListeningSocket&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), port_(other.port_) {}

ListeningSocket& ListeningSocket::operator=(ListeningSocket&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(port_, other.port_);
  return *this;
}

int ListeningSocket::release() { return std::exchange(fd_, -1); }

ListeningSocket listen_on(const std::string& address, int port) {
  if (port < 0 || port > 65535) base::fail<base::UsageError>("{} is not a port (0 to 65535)", port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) base::fail<base::UsageError>("cannot find the address '{}': {}", address, ::gai_strerror(status));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);

  ListeningSocket socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), port);
  if (socket.fd() < 0) base::fail<base::RunError>("cannot create a socket: {}", std::strerror(errno));
  const int on = 1;
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // a port of a run that has just ended is free
  if (::bind(socket.fd(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(socket.fd(), kBacklog) != 0) {
    const int error = errno;
    if (error == EADDRINUSE && port != 0) {
      base::fail<base::UsageError>("port {} of {} is in use: choose another (MASTER_PORT), or end who listens there",
                                   port, address);
    }
    base::fail<base::UsageError>("cannot listen on {}:{}: {}", address, port, std::strerror(error));
  }
  const int bound = bound_port(socket.fd());
  return {socket.release(), bound};
}

}  // namespace fedshard::control
