#include "fedshard/metrics/jsonl.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/metrics/records.h"

namespace fedshard::metrics {

using base::fail;
using base::RunError;

JsonlSink::JsonlSink(std::filesystem::path path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail<RunError>("{}: cannot open for appending: {}", path_.string(), std::strerror(errno));
}

JsonlSink::~JsonlSink() { ::close(fd_); }

void JsonlSink::write(const nlohmann::json& line) {
  // Text that is not UTF-8 (a path, say) is written with replacement characters: a line must parse.
  const std::string text = finite(line).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
  ssize_t written = -1;
  do {
    written = ::write(fd_, text.data(), text.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(text.size())) return;
  const std::string reason = written < 0 ? std::strerror(errno) : "no space left for the whole line";
  if (written > 0) {
    const off_t end = ::lseek(fd_, 0, SEEK_END);
    if (end < written || ::ftruncate(fd_, end - written) != 0) {
      fail<RunError>("{}: cannot append a record: {}; its last line is incomplete", path_.string(), reason);
    }
  }
  fail<RunError>("{}: cannot append a record: {}", path_.string(), reason);
}

}  // namespace fedshard::metrics
