#include "fedshard/comm/nccl.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/comm/chunks.h"
#include "fedshard/comm/plain_words.h"
#include "fedshard/comm/worker.h"

namespace fedshard::comm {
namespace {

using base::fail;
using base::PeersLostError;
using Clock = std::chrono::steady_clock;
using NativeWork = c10::intrusive_ptr<c10d::Work>;
using NativeGroup = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;

constexpr std::chrono::milliseconds kPollEvery{50};
// c10d's own time limit comes so much after ours: when it strikes, c10d waits for a minute and ends the process in its
// own words.
constexpr std::chrono::minutes kBackstop{10};

// An operation under way. Knows nothing of its failure but what c10d says; the overseer knows the deadline.
struct Operation {
  std::string what;  // "all-gather (gather) on the shard axis of group 0, replica 1"
  int rank = 0;
  NativeWork work;
  Clock::time_point begun = Clock::now();
};

// Watches the operations of all communicators of one rank. It exists because the host does not wait for operations:
// it waits for a stream behind them, which never comes to an end when a peer is gone, unless somebody aborts.
class Overseer {
 public:
  Overseer(at::Device device, std::chrono::milliseconds deadline)
      : device_(device), deadline_(deadline), thread_([this] { loop(); }) {}

  ~Overseer() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void enter(NativeGroup group) {
    const std::lock_guard lock(mutex_);
    groups_.push_back(std::move(group));
  }

  void leave(const NativeGroup& group) {
    const std::lock_guard lock(mutex_);
    std::erase(groups_, group);
  }

  void watch(Operation operation) {
    const std::lock_guard lock(mutex_);
    pending_.push_back(std::move(operation));
  }

  // Throws what has ended an operation of any communicator, now and ever after.
  void check() {
    std::vector<NativeGroup> lost;
    std::exception_ptr failure;
    {
      const std::lock_guard lock(mutex_);
      lost = poll();
      failure = failure_;
    }
    abort(lost);
    if (failure) std::rethrow_exception(failure);
  }

 private:
  void loop() {
    const c10::cuda::CUDAGuard guard(device_);
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, kPollEvery, [this] { return closing_; })) {
      const std::vector<NativeGroup> lost = poll();
      lock.unlock();
      abort(lost);
      lock.lock();
    }
  }

  // Forgets what is done. At the first failure returns the groups to abort.
  std::vector<NativeGroup> poll() {
    if (failure_) return {};
    std::vector<Operation> open;
    for (Operation& operation : pending_) {
      bool done = false;
      if (!failure_) failure_ = failure_of(operation, done);
      if (!done) open.push_back(std::move(operation));
    }
    pending_ = std::move(open);
    return failure_ ? groups_ : std::vector<NativeGroup>{};
  }

  // Null while nothing is wrong.
  std::exception_ptr failure_of(const Operation& operation, bool& done) const {
    try {
      done = operation.work->isCompleted();
      if (const std::exception_ptr error = operation.work->exception()) std::rethrow_exception(error);
    } catch (const std::exception& e) {
      return std::make_exception_ptr(
          PeersLostError(fmt::format("rank {}: {} failed: {}", operation.rank, operation.what, plain_words(e))));
    }
    if (done || Clock::now() - operation.begun < deadline_) return nullptr;
    return std::make_exception_ptr(
        PeersLostError(fmt::format("rank {}: {} has not finished within {:g} s: a peer did not come, or computing it "
                                   "took longer than [comm] timeout_s",
                                   operation.rank, operation.what, 1e-3 * static_cast<double>(deadline_.count()))));
  }

  // Ends the kernels that wait for lost peers, and with them the waiting of the host.
  static void abort(const std::vector<NativeGroup>& groups) {
    for (const NativeGroup& group : groups) {
      try {
        group->abort();
      } catch (const std::exception&) {
        // The failure that led here is what gets told.
      }
    }
  }

  at::Device device_;
  std::chrono::milliseconds deadline_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Operation> pending_;
  std::vector<NativeGroup> groups_;
  std::exception_ptr failure_;
  bool closing_ = false;
  std::thread thread_;  // last: it uses the members above
};

class NcclWork final : public Work {
 public:
  NcclWork(NativeWork work, std::string what, int rank, std::shared_ptr<Overseer> overseer)
      : work_(std::move(work)), what_(std::move(what)), rank_(rank), overseer_(std::move(overseer)) {}

  void wait() override {
    overseer_->check();
    try {
      work_->wait();
    } catch (const std::exception& e) {
      fail<PeersLostError>("rank {}: {} failed: {}", rank_, what_, plain_words(e));
    }
  }

 private:
  NativeWork work_;
  std::string what_;
  int rank_;
  std::shared_ptr<Overseer> overseer_;
};

bool is_on_host(const at::Tensor& buffer) { return buffer.device().is_cpu(); }

NativeGroup connect_group(const Members& members, c10d::Store& store, const NcclOptions& options) {
  try {
    auto native = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    native->timeout = options.deadline + kBackstop;
    native->global_ranks_in_group.assign(members.ranks.begin(), members.ranks.end());
    const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("nccl/" + members.name,
                                                                 c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store));
    auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(prefixed, members.index, members.size(), native);
    // Now, when all members are here: a first exchange would otherwise wait for members that have no part in it.
    group->eagerConnectSingleDevice(options.device);
    return group;
  } catch (const std::exception& e) {
    fail<PeersLostError>("rank {}: cannot connect the {} ({} ranks) over NCCL: {}", members.rank(), members.name,
                         members.size(), plain_words(e));
  }
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Members members, Store& store, const NcclOptions& options, TrafficCounter& counter, Watcher watcher,
                   std::shared_ptr<Overseer> overseer)
      : Communicator(std::move(members)),
        device_(options.device),
        counter_(counter),
        watcher_(std::move(watcher)),
        overseer_(std::move(overseer)),
        launch_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, options.device.index())) {
    if (size() == 1) return;
    host_ = options.host(this->members());
    group_ = connect_group(this->members(), store.native(), options);
    overseer_->enter(group_);
  }

  ~NcclCommunicator() override {
    if (!group_) return;
    overseer_->leave(group_);
    try {
      group_->shutdown();  // finishes what is under way
    } catch (const std::exception&) {
      // Whoever waited for an operation has its error; nobody waits for this one.
    }
  }

  WorkPtr all_gather(const at::Tensor& buffer, Purpose purpose, WorkPtr after) override {
    if (goes_over_host(buffer, after)) return host_->all_gather(buffer, purpose, std::move(after));
    const std::vector<std::int64_t> offsets = equal_offsets(buffer);
    return run("all-gather", purpose, std::move(after), bytes_of(buffer, sent_by_gather(offsets, index())), [&] {
      at::Tensor all = buffer, mine = chunk(buffer, offsets, index());
      return group_->_allgather_base(all, mine);
    });
  }

  // As broadcasts in one launch: NCCL's own all-gather knows equal chunks only.
  WorkPtr all_gather(const at::Tensor& buffer, std::vector<std::int64_t> counts, Purpose purpose,
                     WorkPtr after) override {
    if (goes_over_host(buffer, after)) return host_->all_gather(buffer, std::move(counts), purpose, std::move(after));
    std::vector<std::int64_t> offsets{0};
    for (const std::int64_t count : counts) offsets.push_back(offsets.back() + count);
    base::require(static_cast<int>(counts.size()) == size() && offsets.back() == buffer.numel(),
                  "{} chunks of {} elements in all do not fit {} members and a buffer of {}", counts.size(),
                  offsets.back(), size(), buffer.numel());
    return run("all-gather", purpose, std::move(after), bytes_of(buffer, sent_by_gather(offsets, index())), [&] {
      group_->startCoalescing();
      for (int member = 0; member < size(); ++member) {
        if (counts[member] == 0) continue;
        std::vector<at::Tensor> part{chunk(buffer, offsets, member)};
        c10d::BroadcastOptions options;
        options.rootRank = member;
        group_->broadcast(part, options);
      }
      return group_->endCoalescing();
    });
  }

  WorkPtr reduce_scatter(const at::Tensor& buffer, Purpose purpose, WorkPtr after) override {
    if (goes_over_host(buffer, after)) return host_->reduce_scatter(buffer, purpose, std::move(after));
    const std::vector<std::int64_t> offsets = equal_offsets(buffer);
    return run("reduce-scatter", purpose, std::move(after), bytes_of(buffer, sent_by_reduce(offsets, index())), [&] {
      at::Tensor all = buffer, mine = chunk(buffer, offsets, index());
      return group_->_reduce_scatter_base(mine, all);
    });
  }

  WorkPtr all_reduce(const at::Tensor& buffer, Purpose purpose, WorkPtr after) override {
    if (goes_over_host(buffer, after)) return host_->all_reduce(buffer, purpose, std::move(after));
    const std::vector<std::int64_t> offsets = even_offsets(buffer.numel(), size());
    const std::int64_t sent = sent_by_reduce(offsets, index()) + sent_by_gather(offsets, index());
    return run("all-reduce", purpose, std::move(after), bytes_of(buffer, sent), [&] {
      std::vector<at::Tensor> all{buffer};
      return group_->allreduce(all);
    });
  }

  WorkPtr exchange(std::vector<Parcel> sends, std::vector<Parcel> receives, Purpose purpose, WorkPtr after) override {
    std::vector<Parcel> all = sends;
    all.insert(all.end(), receives.begin(), receives.end());
    if (all.empty()) return after ? after : finished_work();
    const auto on_host =
        std::count_if(all.begin(), all.end(), [&](const Parcel& p) { return goes_over_host(p.buffer, after); });
    base::require(on_host == 0 || on_host == static_cast<std::ptrdiff_t>(all.size()),
                  "an exchange on the {} has parcels on the CPU and on {}", members().name, device_.str());
    if (on_host > 0) return host_->exchange(std::move(sends), std::move(receives), purpose, std::move(after));
    std::vector<std::int64_t> bytes(size());
    for (const Parcel& parcel : sends) bytes[parcel.peer] += static_cast<std::int64_t>(parcel.buffer.nbytes());
    return run("exchange", purpose, std::move(after), bytes, [&] {
      group_->startCoalescing();
      for (const Parcel& parcel : receives) {
        if (parcel.buffer.numel() == 0) continue;
        std::vector<at::Tensor> part{parcel.buffer};
        group_->recv(part, parcel.peer, kTag);
      }
      for (const Parcel& parcel : sends) {
        if (parcel.buffer.numel() == 0) continue;
        std::vector<at::Tensor> part{parcel.buffer};
        group_->send(part, parcel.peer, kTag);
      }
      return group_->endCoalescing();
    });
  }

 private:
  static constexpr int kTag = 0;  // NCCL has no tags; c10d's interface does

  // Also checks the buffer. A Work of ours tells a worker thread of the host's communicator nothing: it orders streams.
  bool goes_over_host(const at::Tensor& buffer, const WorkPtr& after) {
    base::require(buffer.is_contiguous() && buffer.dim() == 1 && (is_on_host(buffer) || buffer.device() == device_),
                  "a collective needs a contiguous one-dimensional buffer on the CPU or on {}, not on {}",
                  device_.str(), buffer.device().str());
    overseer_->check();
    if (!is_on_host(buffer) || size() == 1) return false;
    base::require(dynamic_cast<const NcclWork*>(after.get()) == nullptr,
                  "an operation on CPU tensors was to follow one on a GPU on the {}", members().name);
    return true;
  }

  std::vector<std::int64_t> equal_offsets(const at::Tensor& buffer) const {
    base::require(buffer.numel() % size() == 0, "{} elements are not {} equal chunks", buffer.numel(), size());
    return even_offsets(buffer.numel(), size());
  }

  static at::Tensor chunk(const at::Tensor& buffer, const std::vector<std::int64_t>& offsets, int member) {
    return buffer.narrow(0, offsets[member], offsets[member + 1] - offsets[member]);
  }

  // By receiver: as in a ring, all to the next member.
  std::vector<std::int64_t> bytes_of(const at::Tensor& buffer, std::int64_t elements) const {
    std::vector<std::int64_t> bytes(size());
    bytes[(index() + 1) % size()] = elements * buffer.element_size();
    return bytes;
  }

  // NCCL's stream begins when the launch stream has come so far. That one waits for the caller's stream (where the
  // buffer was written, and read before that) and for `after`, so the caller's own kernels need not wait for `after`.
  template <class Start>
  WorkPtr run(const char* name, Purpose purpose, WorkPtr after, const std::vector<std::int64_t>& sent, Start start) {
    if (size() == 1) return after ? after : finished_work();
    overseer_->check();
    const std::string what = fmt::format("{} ({}) on the {}", name, name_of(purpose), members().name);
    if (watcher_) watcher_(what);
    NativeWork work;
    try {
      ready_.record(c10::cuda::getCurrentCUDAStream(device_.index()));
      const c10::cuda::CUDAStreamGuard guard(launch_);
      ready_.block(launch_);
      if (after) after->wait();
      work = start();
    } catch (const base::Error&) {
      throw;  // of `after`
    } catch (const std::exception& e) {
      fail<PeersLostError>("rank {}: {} cannot begin: {}", members().rank(), what, plain_words(e));
    }
    for (int to = 0; to < size(); ++to) {
      if (sent[to] > 0) counter_.add(purpose, members().rank(), members().ranks[to], sent[to]);
    }
    if (!work) return after ? after : finished_work();  // nothing but empty parts
    overseer_->watch({what, members().rank(), work});
    return std::make_shared<NcclWork>(std::move(work), what, members().rank(), overseer_);
  }

  at::Device device_;
  std::unique_ptr<Communicator> host_;  // null, as is group_, in a communicator of one member
  NativeGroup group_;
  TrafficCounter& counter_;
  Watcher watcher_;
  std::shared_ptr<Overseer> overseer_;
  c10::cuda::CUDAStream launch_;
  c10::cuda::CUDAEvent ready_;
};

}  // namespace

void require_nccl() {}

at::Device gpu_of(std::optional<int> local_rank) {
  if (!local_rank) {
    fail<base::UsageError>(
        "[comm] backend = \"nccl\" needs one GPU a rank, but the launcher does not say which rank of its node this is");
  }
  const int gpus = c10::cuda::device_count();
  if (*local_rank >= gpus) {
    fail<base::UsageError>("local rank {} has no GPU: {} can be seen here; start no more ranks a node than it has GPUs",
                           *local_rank, gpus);
  }
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(*local_rank));
  at::globalContext().lazyInitDevice(at::kCUDA);
  c10::cuda::set_device(device.index());
  return device;
}

Connect connect_over_nccl(std::shared_ptr<Store> store, NcclOptions options, TrafficCounter& counter, Watcher watcher) {
  auto overseer = std::make_shared<Overseer>(options.device, options.deadline);
  return [store = std::move(store), options = std::move(options), &counter, watcher = std::move(watcher),
          overseer](Members members) -> std::unique_ptr<Communicator> {
    return std::make_unique<NcclCommunicator>(std::move(members), *store, options, counter, watcher, overseer);
  };
}

}  // namespace fedshard::comm
