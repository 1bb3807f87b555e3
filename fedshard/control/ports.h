// A listening TCP socket that is bound before anybody is told its port.
// The surprising part: it is handed over as a descriptor (c10d's store takes one), because a port that is merely found
// free can be taken by somebody else before it is used.
#pragma once
#include <string>

namespace fedshard::control {

// Owns the descriptor until release(). Closed on exec.
class ListeningSocket {
 public:
  ListeningSocket(int fd, int port) : fd_(fd), port_(port) {}
  ~ListeningSocket();
  ListeningSocket(ListeningSocket&& other) noexcept;
  ListeningSocket& operator=(ListeningSocket&& other) noexcept;
  int fd() const { return fd_; }
  int port() const { return port_; }
  int release();  // the descriptor is the caller's from now on

 private:
  int fd_;
  int port_;
};

// Binds and listens on `address` (a name or a number); port 0 lets the system choose. Throws UsageError that names the
// address and the port where the port is taken or may not be used, or where the address is not one of this machine's.
ListeningSocket listen_on(const std::string& address, int port);

}  // namespace fedshard::control
