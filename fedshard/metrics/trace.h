// What a rank did when, as Chrome trace events (the "Trace Event Format" document; chrome://tracing and Perfetto read
// them): a rank is a process, a lane ("compute", "communication") one of its threads.
// A surprise: times are those of the clock, not since the start of the rank, so that the traces of all ranks of a
// machine lie on one axis, and one list of events made from several files shows them together.
#pragma once
#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "fedshard/base/clock.h"

namespace fedshard::metrics {

class Trace {
 public:
  // Writes the trace of `rank` to `path`, replacing what was there; `clock` outlives this. Throws RunError naming the
  // file where it can't be opened.
  Trace(std::filesystem::path path, int rank, const base::Clock& clock);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Something that took from `begin_s` to `end_s` of the clock. Safe from any thread, and never throws for the file's
  // sake: it is called while the stack unwinds. close() tells what went wrong. Not after close().
  void add(std::string_view lane, std::string_view name, std::string_view category, double begin_s, double end_s);

  // Ends the file's JSON and closes it. Throws RunError naming the file where any part of it could not be written.
  // Without it the file holds the events so far, which viewers read although the list is not ended.
  void close();

  double now() const { return clock_.now(); }

 private:
  int lane_index(std::string_view lane);  // names the lane in the file when it is new
  void put(std::string_view event);
  void flush();

  std::mutex mutex_;
  std::filesystem::path path_;
  int rank_;
  const base::Clock& clock_;
  int fd_ = -1;
  int error_ = 0;  // errno of the first failed write
  std::string buffer_;
  std::map<std::string, int, std::less<>> lanes_;
};

// Adds an event for as long as it lives; does nothing where `trace` is null, so callers need not ask whether one is
// wanted. The texts outlive it.
class Span {
 public:
  Span(Trace* trace, std::string_view lane, std::string_view name, std::string_view category)
      : trace_(trace), lane_(lane), name_(name), category_(category), begin_s_(trace != nullptr ? trace->now() : 0) {}
  ~Span() {
    if (trace_ != nullptr) trace_->add(lane_, name_, category_, begin_s_, trace_->now());
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Trace* trace_;
  std::string_view lane_;
  std::string_view name_;
  std::string_view category_;
  double begin_s_;
};

}  // namespace fedshard::metrics
