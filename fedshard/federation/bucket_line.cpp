#include "fedshard/federation/bucket_line.h"

#include <deque>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/comm/worker.h"
#include "fedshard/federation/parcels.h"

namespace fedshard::federation {
namespace {

struct UnderWay {
  std::size_t bucket = 0;
  std::vector<comm::Parcel> to_owners, of_peers;
  comm::WorkPtr work;
};

}  // namespace

void exchange_buckets(comm::Communicator& federation, const std::vector<BucketSizes>& buckets, at::ScalarType dtype,
                      int concurrency, comm::Purpose purpose, const BucketSteps& steps) {
  base::require(concurrency >= 1, "{} buckets in flight", concurrency);
  std::deque<UnderWay> line;
  const auto exchange = [&](const std::vector<comm::Parcel>& sends, const std::vector<comm::Parcel>& receives) {
    return sends.empty() && receives.empty() ? comm::finished_work() : federation.exchange(sends, receives, purpose);
  };
  const auto begin = [&](std::size_t b) {
    UnderWay& next = line.emplace_back(
        UnderWay{b, parcels_of(buckets[b].to_owner, dtype), parcels_of(buckets[b].from_peer, dtype), nullptr});
    steps.pack(b, next.to_owners);
    next.work = exchange(next.to_owners, next.of_peers);
  };
  const auto send_back = [&](UnderWay& bucket) {
    bucket.work->wait();
    steps.sum(bucket.bucket, bucket.of_peers);
    bucket.work = exchange(bucket.of_peers, bucket.to_owners);
  };
  const auto finish_oldest = [&] {
    line.front().work->wait();
    steps.take(line.front().bucket, line.front().to_owners);
    line.pop_front();
  };
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    if (std::ssize(line) == concurrency) finish_oldest();
    begin(b);
    // Where there is room for it, the one before is summed while this one travels.
    if (concurrency == 1) send_back(line.back());
    if (line.size() > 1) send_back(*std::prev(line.end(), 2));
  }
  if (concurrency > 1 && !line.empty()) send_back(line.back());
  while (!line.empty()) finish_oldest();
}

}  // namespace fedshard::federation
