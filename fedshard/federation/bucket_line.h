// Takes the buckets of an owner exchange to their owners and back, several at once: while one travels, the one before
// it is summed and the one behind it packed.
//
// A surprise: a rank goes through all buckets, also through those of which it holds nothing. Two ranks must have the
// messages between them in one order, whatever each has to do with others beside that.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "fedshard/comm/communicator.h"

namespace fedshard::federation {

// Elements of a bucket's messages, by peer: of mine that it owns, and of its that I own.
struct BucketSizes {
  std::map<int, std::int64_t> to_owner, from_peer;
};

// What is done with the messages of a bucket (parcels_of its sizes), in the order of the buckets.
struct BucketSteps {
  std::function<void(std::size_t bucket, const std::vector<comm::Parcel>& to_owners)> pack;
  // Reads what peers have sent and leaves there what they shall have back.
  std::function<void(std::size_t bucket, const std::vector<comm::Parcel>& of_peers)> sum;
  std::function<void(std::size_t bucket, const std::vector<comm::Parcel>& returned)> take;
};

// concurrency: buckets whose messages exist at once, from 1. Collective over the federation axis; the number of buckets
// and concurrency are the same on all its members. Returns when the last bucket is taken.
void exchange_buckets(comm::Communicator& federation, const std::vector<BucketSizes>& buckets, at::ScalarType dtype,
                      int concurrency, comm::Purpose purpose, const BucketSteps& steps);

}  // namespace fedshard::federation
