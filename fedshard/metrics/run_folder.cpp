#include "fedshard/metrics/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"

namespace fedshard::metrics {

using base::fail;

// A lock on metrics.jsonl. The kernel lets go of it when its process ends, however that happens.
class RunFolder::Claim {
 public:
  explicit Claim(const RunFolder& folder) {
    fd_ = ::open(folder.metrics().c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd_ < 0) {
      fail<base::UsageError>("{}: cannot open: {}; give the run another folder (--set metrics.folder=...)",
                             folder.metrics().string(), std::strerror(errno));
    }
    if (::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
    ::close(fd_);
    fail<base::UsageError>(
        "{}: another run has just begun there; give this one another folder (--set "
        "metrics.folder=...)",
        folder.path().string());
  }
  ~Claim() { ::close(fd_); }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  int fd_;
};

RunFolder RunFolder::create(const std::filesystem::path& path, std::string_view resolved_config) {
  RunFolder folder(path);
  std::error_code error;
  const auto records = std::filesystem::file_size(folder.metrics(), error);
  if (!error && records > 0) {
    fail<base::UsageError>(
        "{}: holds a run already; give this one another folder (--set metrics.folder=...) or remove "
        "that one",
        path.string());
  }
  std::filesystem::create_directories(path / "ranks", error);
  if (error) {
    fail<base::UsageError>("{}: cannot make the run folder: {}; give the run another one (--set metrics.folder=...)",
                           path.string(), error.message());
  }
  folder.claim_ = std::make_shared<const Claim>(folder);
  base::write_file_atomically(folder.config(), resolved_config);
  return folder;
}

std::filesystem::path RunFolder::log(int rank) const {
  return rank == 0 ? path_ / "log.txt" : path_ / "ranks" / fmt::format("{}.log.txt", rank);
}

std::filesystem::path RunFolder::trace(int rank) const { return path_ / "ranks" / fmt::format("{}.trace.json", rank); }

}  // namespace fedshard::metrics
