#include "fedshard/metrics/trace.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::metrics {
namespace {

constexpr std::size_t flush_at_bytes = 1 << 16;

std::string quoted(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// An event that names a process or thread in the viewer.
std::string naming(const char* what, int rank, int lane, std::string_view name) {
  return fmt::format(R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":{}}}}})", what, rank, lane,
                     quoted(name));
}

}  // namespace

Trace::Trace(std::filesystem::path path, int rank, const base::Clock& clock)
    : path_(std::move(path)), rank_(rank), clock_(clock) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) base::fail<base::RunError>("{}: cannot open the trace: {}", path_.string(), std::strerror(errno));
  buffer_ = "[\n" + naming("process_name", rank_, 0, fmt::format("rank {}", rank_));
}

Trace::~Trace() {
  if (fd_ < 0) return;
  flush();
  ::close(fd_);
}

void Trace::add(std::string_view lane, std::string_view name, std::string_view category, double begin_s, double end_s) {
  const std::lock_guard lock(mutex_);
  base::require(fd_ >= 0, "{}: an event after the end of the trace", path_.string());
  const int thread = lane_index(lane);
  put(fmt::format(R"({{"ph":"X","name":{},"cat":{},"pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f}}})", quoted(name),
                  quoted(category), rank_, thread, begin_s * 1e6, (end_s - begin_s) * 1e6));
  if (buffer_.size() >= flush_at_bytes) flush();
}

void Trace::close() {
  const std::lock_guard lock(mutex_);
  base::require(fd_ >= 0, "{}: the trace is closed already", path_.string());
  buffer_ += "\n]\n";
  flush();
  if (::close(std::exchange(fd_, -1)) != 0 && error_ == 0) error_ = errno;
  if (error_ != 0) {
    base::fail<base::RunError>("{}: cannot write the trace: {}", path_.string(), std::strerror(error_));
  }
}

int Trace::lane_index(std::string_view lane) {
  if (const auto known = lanes_.find(lane); known != lanes_.end()) return known->second;
  const int index = static_cast<int>(lanes_.size());
  lanes_.emplace(lane, index);
  put(naming("thread_name", rank_, index, lane));
  return index;
}

void Trace::put(std::string_view event) { buffer_.append(",\n").append(event); }

void Trace::flush() {
  std::string_view rest = buffer_;
  while (!rest.empty() && error_ == 0) {
    const ssize_t n = ::write(fd_, rest.data(), rest.size());
    if (n >= 0) {
      rest.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno != EINTR) {
      error_ = errno;
    }
  }
  buffer_.clear();
}

}  // namespace fedshard::metrics
