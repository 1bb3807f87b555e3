#include "fedshard/train/open_store.h"

#include "fedshard/control/ports.h"

namespace fedshard::train {
namespace {

// torchrun's agent serves a store at MASTER_ADDR:MASTER_PORT itself, unless told not to.
bool agent_serves_store() {
  const auto flag = control::process_environment("TORCHELASTIC_USE_AGENT_STORE");
  return flag && (*flag == "True" || *flag == "1");
}

}  // namespace

std::shared_ptr<comm::Store> open_store(const control::Place& place, std::chrono::milliseconds timeout,
                                        bool may_serve) {
  const bool our_launcher_serves = !place.coordinator.empty();
  const bool serves = may_serve && place.rank == 0 && !our_launcher_serves && !agent_serves_store();
  if (!serves) return comm::Store::connect(place.master_address, place.master_port, timeout);
  control::ListeningSocket socket = control::listen_on(place.master_address, place.master_port);
  const int port = socket.port();
  return comm::Store::serve(socket.release(), place.master_address, port, timeout);
}

}  // namespace fedshard::train
