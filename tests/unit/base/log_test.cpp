#include "fedshard/base/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "fedshard/base/file.h"

namespace fedshard::base {
namespace {

// Lines without their time.
std::string lines_of(const std::filesystem::path& file) {
  std::string text = read_file(file), lines;
  for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
    lines += text.substr(text.find(' ', begin) + 1, end - text.find(' ', begin));
  }
  return lines;
}

TEST(Log, OfAThreadApartIsItsOwn) {
  const auto folder = std::filesystem::path(testing::TempDir()) / fmt::format("fedshard-log-{}", ::getpid());
  std::filesystem::create_directories(folder);
  log_as("rank 0");
  log_to_file(folder / "0");
  std::jthread([&] {
    log_apart();
    log_as("rank 2");
    log_to_file(folder / "2");
    log_info("step {}", 1);
    std::jthread([] { log_error("from a stranger"); }).join();
    std::jthread([log = own_log()] {
      share_log(log);
      log_error("from a worker");
    }).join();
  }).join();
  EXPECT_EQ(own_log(), nullptr);
  log_warning("still here");
  EXPECT_EQ(lines_of(folder / "2"), "info [rank 2] step 1\nerror [rank 2] from a worker\n");
  EXPECT_EQ(lines_of(folder / "0"), "error [rank 0] from a stranger\nwarning [rank 0] still here\n");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace fedshard::base
