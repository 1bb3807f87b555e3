// Gloo as a transport of messages. Its collectives are not used (ring.h says why), only its connections.
#pragma once
#include <chrono>
#include <memory>
#include <string>

#include "fedshard/comm/store.h"
#include "fedshard/comm/transport.h"

namespace fedshard::comm {

struct GlooOptions {
  std::string interface;               // network interface ("eth0"); empty: the one that reaches `address`
  std::string address = "127.0.0.1";   // of this rank, where no interface is named
  std::chrono::milliseconds deadline;  // of every message; past it the waiting side throws
};

// Facts about Gloo that callers must live with: a wait that failed leaves the operation running, and destroying a
// transport with an operation under way blocks until the deadline. A rank that fails therefore ends by _exit.
std::unique_ptr<Backend> make_gloo_backend(std::shared_ptr<Store> store, GlooOptions options);

// Throws UsageError, listing those that there are, where this machine has no network interface `name` with an address.
void require_interface(const std::string& name);

// The address by which this machine reaches host:port, found without sending anything.
std::string address_towards(const std::string& host, int port);

}  // namespace fedshard::comm
