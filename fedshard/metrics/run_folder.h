// The folder that a run leaves behind, and the names of the files in it.
// A surprise: a folder with records of a run is refused, also where its name was not given but made from the config
// file's: two runs in one file of metrics are worth less than none, and what took hours is not overwritten by pressing
// the up arrow. A run that failed before its first record leaves no records, so it can be started again.
#pragma once
#include <filesystem>
#include <memory>
#include <string_view>

namespace fedshard::metrics {

class RunFolder {
 public:
  // Names only; nothing is touched.
  explicit RunFolder(std::filesystem::path path) : path_(std::move(path)) {}

  // Makes the folder and `ranks/` in it and writes config.toml; to be called by one process of the run, before the
  // others write there. Throws UsageError where metrics.jsonl holds records already, where a living process
  // has made the folder its own, or where it can't be made; RunError where config.toml can't be written. The folder is
  // this run's as long as what is returned, or a copy of it, lives (on file systems that know locks).
  static RunFolder create(const std::filesystem::path& path, std::string_view resolved_config);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path config() const { return path_ / "config.toml"; }
  std::filesystem::path metrics() const { return path_ / "metrics.jsonl"; }
  std::filesystem::path log(int rank) const;    // log.txt for rank 0, ranks/3.log.txt
  std::filesystem::path trace(int rank) const;  // ranks/3.trace.json

 private:
  class Claim;
  std::filesystem::path path_;
  std::shared_ptr<const Claim> claim_;
};

}  // namespace fedshard::metrics
