// metrics.jsonl: one record a line, appended.
// A surprise: nothing is buffered. A line is handed to the system in one write(), so lines never mix, and whoever dies
// loses none that it has written. A line that only fits in part (a full disk) is taken back out. Only SIGKILL to the
// writing process itself can leave a part of one: the kernel stops such a write at the end of a page.
#pragma once
#include <filesystem>

#include "fedshard/metrics/sink.h"

namespace fedshard::metrics {

class JsonlSink final : public Sink {
 public:
  // Opens for appending, making the file where there is none. Throws RunError naming the file and the reason.
  explicit JsonlSink(std::filesystem::path path);
  ~JsonlSink() override;
  JsonlSink(const JsonlSink&) = delete;
  JsonlSink& operator=(const JsonlSink&) = delete;

  // Passes `line` through finite(). Throws RunError naming the file and the reason (a full disk, a quota).
  void write(const nlohmann::json& line) override;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace fedshard::metrics
