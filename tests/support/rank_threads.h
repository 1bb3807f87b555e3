// Runs the ranks of a layout as threads over the loopback transport.
#pragma once
#include <ATen/Parallel.h>

#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "fedshard/comm/axes.h"
#include "fedshard/comm/loopback.h"

namespace fedshard::testing_support {

// Calls body(rank, axes, others) for every rank, each on a thread of its own, with two sets of axes; rethrows the first
// exception. Returns the bytes that all ranks sent. wrap: what is to come between a rank and its messages. patience:
// for each message.
using BackendWrap = std::function<std::unique_ptr<comm::Backend>(int rank, std::unique_ptr<comm::Backend>)>;
inline comm::Traffic on_ranks(const topology::Layout& layout,
                              const std::function<void(int, comm::Axes&, comm::Axes&)>& body,
                              const BackendWrap& wrap = nullptr,
                              std::chrono::milliseconds patience = std::chrono::seconds(30)) {
  comm::LoopbackWorld world(patience);
  comm::TrafficCounter counter(comm::groups_by_rank(layout));
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < layout.world(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);  // of OpenMP; more would only wait for one another, in spins
        const auto backend = wrap ? wrap(rank, world.backend(rank)) : world.backend(rank);
        comm::Axes axes = comm::make_axes(layout, rank, *backend, counter);
        comm::Axes others =
            comm::make_axes(layout, rank, comm::connect_over_messages(*backend, counter, nullptr), ", others");
        body(rank, axes, others);
      } catch (...) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        world.break_down();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
  return counter.read();
}

// With one set of axes.
inline comm::Traffic on_ranks(const topology::Layout& layout, const std::function<void(int, comm::Axes&)>& body) {
  return on_ranks(layout, [&](int rank, comm::Axes& axes, comm::Axes&) { body(rank, axes); });
}

}  // namespace fedshard::testing_support
