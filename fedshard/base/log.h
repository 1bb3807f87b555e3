// One logger a process: a line is `time level [rank] text`. Rank 0 writes log.txt of the run folder, the others a file
// each under ranks/; until a file is set, lines go to standard error. Safe from any thread.
// A surprise: a rank that is a thread has a logger of its own, which the threads that work for it must be given.
#pragma once
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace fedshard::base {

enum class LogLevel { debug, info, warning, error };
struct Log;

void log_to_file(const std::filesystem::path& path);  // appends; throws RunError where it can't be opened
void log_as(std::string who);                         // "rank 3", "launcher"
void log_apart();                                     // this thread: what it sets and logs from now on is its own
std::shared_ptr<Log> own_log();                       // of this thread; null: it logs to the process's
void share_log(std::shared_ptr<Log> log);             // this thread logs there from now on; null: to the process's
void write_log(LogLevel level, std::string_view text);

template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  write_log(LogLevel::info, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  write_log(LogLevel::warning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  write_log(LogLevel::error, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace fedshard::base
