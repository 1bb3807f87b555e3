#include "fedshard/metrics/run_folder.h"

#include <fmt/format.h>

#include <system_error>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"

namespace fedshard::metrics {

using base::fail;

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
  base::write_file_atomically(folder.config(), resolved_config);
  return folder;
}

std::filesystem::path RunFolder::log(int rank) const {
  return rank == 0 ? path_ / "log.txt" : path_ / "ranks" / fmt::format("{}.log.txt", rank);
}

std::filesystem::path RunFolder::trace(int rank) const { return path_ / "ranks" / fmt::format("{}.trace.json", rank); }

}  // namespace fedshard::metrics
