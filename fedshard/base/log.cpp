#include "fedshard/base/log.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>

#include "fedshard/base/error.h"

namespace fedshard::base {

struct Log {
  Log() = default;
  ~Log() {
    if (file != nullptr) std::fclose(file);
  }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  std::mutex mutex;
  std::FILE* file = nullptr;
  std::string who;
};

namespace {

thread_local std::shared_ptr<Log> of_this_thread;

Log& the_log() {
  static Log log;
  return of_this_thread ? *of_this_thread : log;
}

std::string_view name_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return "debug";
    case LogLevel::info:
      return "info";
    case LogLevel::warning:
      return "warning";
    case LogLevel::error:
      return "error";
  }
  return "?";
}

std::string time_of_day() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm parts{};
  ::localtime_r(&seconds, &parts);
  return fmt::format("{:02}:{:02}:{:02}.{:03}", parts.tm_hour, parts.tm_min, parts.tm_sec, millis);
}

}  // namespace

void log_to_file(const std::filesystem::path& path) {
  std::FILE* file = std::fopen(path.c_str(), "ae");
  if (file == nullptr) fail<RunError>("{}: cannot open the log: {}", path.string(), std::strerror(errno));
  Log& log = the_log();
  const std::lock_guard lock(log.mutex);
  if (log.file != nullptr) std::fclose(log.file);
  log.file = file;
}

void log_as(std::string who) {
  Log& log = the_log();
  const std::lock_guard lock(log.mutex);
  log.who = std::move(who);
}

void log_apart() { of_this_thread = std::make_shared<Log>(); }

std::shared_ptr<Log> own_log() { return of_this_thread; }

void share_log(std::shared_ptr<Log> log) { of_this_thread = std::move(log); }

void write_log(LogLevel level, std::string_view text) {
  Log& log = the_log();
  const std::lock_guard lock(log.mutex);
  const std::string line = fmt::format("{} {} [{}] {}\n", time_of_day(), name_of(level), log.who, text);
  std::FILE* out = log.file != nullptr ? log.file : stderr;
  std::fwrite(line.data(), 1, line.size(), out);
  std::fflush(out);
}

}  // namespace fedshard::base
