// Ranks as threads of one process: messages are copied through mailboxes. For tests that want many layouts cheaply; the
// collectives above it are the ones that real runs use.
#pragma once
#include <chrono>
#include <memory>

#include "fedshard/comm/transport.h"

namespace fedshard::comm {

// Shared by all the ranks; must outlive their backends.
class LoopbackWorld {
 public:
  explicit LoopbackWorld(std::chrono::milliseconds deadline = std::chrono::seconds(60));
  ~LoopbackWorld();
  // For the thread that plays `rank`.
  std::unique_ptr<Backend> backend(int rank);
  // From now on every send and receive throws, as after the death of a process. For tests of failures.
  void break_down();

  struct Shared;

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace fedshard::comm
