#include "fedshard/control/io_thread.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::control {

// A new thread inherits the mask of its maker.
std::thread start_io_thread(std::function<void()> body) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

WakeUp::WakeUp() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd_ < 0) base::fail<base::RunError>("cannot create an event descriptor: {}", std::strerror(errno));
}

WakeUp::~WakeUp() { ::close(fd_); }

// Neither can fail in a way that matters: a full counter is still readable, an empty one is already clear.
void WakeUp::notify() { ::eventfd_write(fd_, 1); }

void WakeUp::clear() {
  eventfd_t count = 0;
  ::eventfd_read(fd_, &count);
}

void wait_readable(std::initializer_list<void*> sockets, WakeUp& wake_up, std::chrono::milliseconds patience) {
  std::vector<zmq_pollitem_t> items;
  for (void* socket : sockets) items.push_back({socket, 0, ZMQ_POLLIN, 0});
  items.push_back({nullptr, wake_up.fd(), ZMQ_POLLIN, 0});
  // A stopped and continued process may see EINTR although it blocks all signals.
  if (zmq_poll(items.data(), static_cast<int>(items.size()), patience.count()) < 0 && zmq_errno() != EINTR) {
    base::fail<base::RunError>("cannot wait for control messages: {}", zmq_strerror(zmq_errno()));
  }
  wake_up.clear();
}

}  // namespace fedshard::control
