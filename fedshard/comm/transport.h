// Point-to-point messages between the members of one communicator: the narrow waist that Gloo and loopback share. All
// our collectives are made of these, so one counter sees every byte and one arithmetic order holds on every transport.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace fedshard::comm {

// A message under way. Its memory must stay valid until wait() has returned or thrown.
class Request {
 public:
  virtual ~Request() = default;
  // Throws (any std::exception) when the peer is lost or the transport's deadline passes.
  virtual void wait() = 0;
};

// The members of one communicator and where this process stands among them.
struct Members {
  std::string name;        // "shard axis of group 0, replica 1"; goes into every error
  std::vector<int> ranks;  // world ranks, in the order of the axis
  int index = 0;           // this rank's place in `ranks`
  int size() const { return static_cast<int>(ranks.size()); }
  int rank() const { return ranks[index]; }
};

// Messages between two members arrive in the order sent; a receive must name the exact size. Used by one thread at a
// time. `to` and `from` are indices into Members::ranks.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::unique_ptr<Request> send(const void* data, std::size_t bytes, int to) = 0;
  virtual std::unique_ptr<Request> receive(void* data, std::size_t bytes, int from) = 0;
};

// Makes the transports of one rank. Every member must call connect() for the same communicators in the same order.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::unique_ptr<Transport> connect(const Members& members) = 0;
};

}  // namespace fedshard::comm
