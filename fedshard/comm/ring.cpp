#include "fedshard/comm/ring.h"

#include <ATen/ATen.h>
#include <c10/util/BFloat16.h>

#include <atomic>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/comm/chunks.h"
#include "fedshard/comm/plain_words.h"
#include "fedshard/comm/worker.h"

namespace fedshard::comm {
namespace {

using base::fail;
using base::PeersLostError;

// dst += src, elementwise, rounded to the buffer's dtype. A plain loop: it runs on the worker thread, which must not
// start a second pool of compute threads.
template <class T>
void add_elements(void* dst, const void* src, std::int64_t count) {
  auto* d = static_cast<T*>(dst);
  const auto* s = static_cast<const T*>(src);
  for (std::int64_t i = 0; i < count; ++i) d[i] += s[i];
}

void add_into(void* dst, const void* src, std::int64_t count, at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return add_elements<float>(dst, src, count);
    case at::kBFloat16:
      return add_elements<c10::BFloat16>(dst, src, count);
    default:
      fail<base::RunError>("internal error: cannot sum tensors of type {}", c10::toString(dtype));
  }
}

// A contiguous buffer cut into one chunk a member.
struct Chunks {
  at::Tensor buffer;
  std::vector<std::int64_t> offsets;  // n + 1 element offsets
  std::byte* at(int i) const { return static_cast<std::byte*>(buffer.data_ptr()) + offsets[i] * buffer.element_size(); }
  std::int64_t count(int i) const { return offsets[i + 1] - offsets[i]; }
  std::size_t bytes(int i) const { return static_cast<std::size_t>(count(i) * buffer.element_size()); }
  std::int64_t largest() const {
    std::int64_t most = 0;
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) most = std::max(most, count(static_cast<int>(i)));
    return most;
  }
};

void check_buffer(const at::Tensor& buffer) {
  base::require(buffer.is_contiguous() && buffer.dim() == 1 && buffer.device().is_cpu(),
                "a collective needs a contiguous one-dimensional CPU buffer");
}

// Cuts as evenly as whole elements allow.
Chunks even_chunks(const at::Tensor& buffer, int n) {
  check_buffer(buffer);
  return {buffer, even_offsets(buffer.numel(), n)};
}

Chunks equal_chunks(const at::Tensor& buffer, int n) {
  base::require(buffer.numel() % n == 0, "{} elements are not {} equal chunks", buffer.numel(), n);
  return even_chunks(buffer, n);
}

class RingCommunicator final : public Communicator {
 public:
  RingCommunicator(Members members, std::unique_ptr<Transport> transport, TrafficCounter& counter, Watcher watcher)
      : Communicator(std::move(members)),
        transport_(std::move(transport)),
        counter_(counter),
        watcher_(std::move(watcher)) {}

  WorkPtr all_gather(const at::Tensor& buffer, Purpose purpose, WorkPtr after) override {
    return run("all-gather", purpose, std::move(after),
               [this, chunks = equal_chunks(buffer, size()), purpose] { ring_gather(chunks, purpose); });
  }

  WorkPtr all_gather(const at::Tensor& buffer, std::vector<std::int64_t> counts, Purpose purpose,
                     WorkPtr after) override {
    check_buffer(buffer);
    Chunks chunks{buffer, {0}};
    for (const std::int64_t count : counts) chunks.offsets.push_back(chunks.offsets.back() + count);
    base::require(static_cast<int>(counts.size()) == size() && chunks.offsets.back() == buffer.numel(),
                  "{} chunks of {} elements in all do not fit {} members and a buffer of {}", counts.size(),
                  chunks.offsets.back(), size(), buffer.numel());
    return run("all-gather", purpose, std::move(after),
               [this, chunks = std::move(chunks), purpose] { ring_gather(chunks, purpose); });
  }

  WorkPtr reduce_scatter(const at::Tensor& buffer, Purpose purpose, WorkPtr after) override {
    return run("reduce-scatter", purpose, std::move(after),
               [this, chunks = equal_chunks(buffer, size()), purpose] { ring_reduce(chunks, purpose); });
  }

  WorkPtr all_reduce(const at::Tensor& buffer, Purpose purpose, WorkPtr after) override {
    return run("all-reduce", purpose, std::move(after), [this, chunks = even_chunks(buffer, size()), purpose] {
      ring_reduce(chunks, purpose);
      ring_gather(chunks, purpose);
    });
  }

  WorkPtr exchange(std::vector<Parcel> sends, std::vector<Parcel> receives, Purpose purpose, WorkPtr after) override {
    for (const auto* parcels : {&sends, &receives}) {
      for (const Parcel& parcel : *parcels) check_buffer(parcel.buffer);
    }
    return run("exchange", purpose, std::move(after),
               [this, out = std::move(sends), in = std::move(receives), purpose] { exchange_now(out, in, purpose); });
  }

 private:
  WorkPtr run(const char* what, Purpose purpose, WorkPtr after, std::function<void()> operation) {
    if (size() == 1) return after ? after : finished_work();
    return worker_.run([this, what, purpose, previous = std::move(after), body = std::move(operation)] {
      if (previous) previous->wait();
      ++operations_;
      what_ = what;
      purpose_ = purpose;
      if (watcher_) watcher_(fmt::format("{} ({}) on the {}", what, name_of(purpose), members().name));
      body();
    });
  }

  // Member r ends with the sum of chunk r. In step k it passes on the partial sum of chunk r-1-k and receives that of
  // chunk r-2-k, so chunk c is summed in ring order, beginning with member c+1.
  void ring_reduce(const Chunks& chunks, Purpose purpose) {
    const int n = size(), r = index();
    const at::Tensor received = at::empty({chunks.largest()}, chunks.buffer.options());
    for (int k = 0; k + 1 < n; ++k) {
      const int out = (r - 1 - k + 2 * n) % n, in = (r - 2 - k + 2 * n) % n;
      pass(chunks.at(out), chunks.bytes(out), received.data_ptr(), chunks.bytes(in), purpose);
      add_into(chunks.at(in), received.data_ptr(), chunks.count(in), chunks.buffer.scalar_type());
    }
  }

  void ring_gather(const Chunks& chunks, Purpose purpose) {
    const int n = size(), r = index();
    for (int k = 0; k + 1 < n; ++k) {
      const int out = (r - k + n) % n, in = (r - 1 - k + n) % n;
      pass(chunks.at(out), chunks.bytes(out), chunks.at(in), chunks.bytes(in), purpose);
    }
  }

  // One step of a ring: to the next member, from the one before.
  void pass(const void* out, std::size_t out_bytes, void* in, std::size_t in_bytes, Purpose purpose) {
    const int to = (index() + 1) % size(), from = (index() - 1 + size()) % size();
    const auto receiving = start_receive(in, in_bytes, from);
    const auto sending = start_send(out, out_bytes, to, purpose);
    finish(receiving.get(), from);
    finish(sending.get(), to);
  }

  void exchange_now(const std::vector<Parcel>& sends, const std::vector<Parcel>& receives, Purpose purpose) {
    std::vector<std::pair<std::unique_ptr<Request>, int>> requests;
    for (const Parcel& parcel : receives) {
      requests.emplace_back(start_receive(parcel.buffer.data_ptr(), parcel.buffer.nbytes(), parcel.peer), parcel.peer);
    }
    for (const Parcel& parcel : sends) {
      requests.emplace_back(start_send(parcel.buffer.data_ptr(), parcel.buffer.nbytes(), parcel.peer, purpose),
                            parcel.peer);
    }
    for (const auto& [request, peer] : requests) finish(request.get(), peer);
  }

  // Nothing travels for nothing: both sides know the sizes, so both skip.
  std::unique_ptr<Request> start_send(const void* data, std::size_t bytes, int to, Purpose purpose) {
    if (bytes == 0) return nullptr;
    counter_.add(purpose, members().rank(), members().ranks[to], static_cast<std::int64_t>(bytes));
    return guarded(to, [&] { return transport_->send(data, bytes, to); });
  }

  std::unique_ptr<Request> start_receive(void* data, std::size_t bytes, int from) {
    if (bytes == 0) return nullptr;
    return guarded(from, [&] { return transport_->receive(data, bytes, from); });
  }

  void finish(Request* request, int peer) {
    if (request == nullptr) return;
    guarded(peer, [&] {
      request->wait();
      return 0;
    });
  }

  template <class Body>
  auto guarded(int peer, Body body) -> decltype(body()) {
    try {
      return body();
    } catch (const std::exception& e) {
      fail<PeersLostError>("rank {}: {} {} ({}) on the {} failed while waiting for rank {}: {}", members().rank(),
                           what_, operations_, name_of(purpose_), members().name, members().ranks[peer],
                           plain_words(e));
    }
  }

  std::unique_ptr<Transport> transport_;
  TrafficCounter& counter_;
  Watcher watcher_;
  // What the worker is at, for its error messages; touched by the worker alone.
  std::int64_t operations_ = 0;
  const char* what_ = "";
  Purpose purpose_ = Purpose::control;
  Worker worker_;  // last: its thread must end before the members above go
};

}  // namespace

std::unique_ptr<Communicator> make_ring_communicator(Members members, std::unique_ptr<Transport> transport,
                                                     TrafficCounter& counter, Watcher watcher) {
  return std::make_unique<RingCommunicator>(std::move(members), std::move(transport), counter, std::move(watcher));
}

}  // namespace fedshard::comm
