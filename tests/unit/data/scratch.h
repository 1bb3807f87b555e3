// What the tests of this room share: a folder of their own, and a check of the message of an error.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "fedshard/base/error.h"

namespace fedshard::data {

// A path in an empty folder of the running test.
inline std::filesystem::path scratch(const std::string& name) {
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  const auto folder = std::filesystem::path(testing::TempDir()) / fmt::format("fedshard-data-{}", ::getpid()) /
                      test->test_suite_name() / test->name();
  std::filesystem::create_directories(folder);
  return folder / name;
}

inline std::filesystem::path write_scratch(const std::string& name, const std::string& content) {
  const auto path = scratch(name);
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

inline std::string read_scratch(const std::filesystem::path& path) {
  std::stringstream content;
  content << std::ifstream(path, std::ios::binary).rdbuf();
  return content.str();
}

// Fails the test unless `action` throws a Kind whose message contains every one of `parts`.
template <class Kind, class Action>
void expect_error(const Action& action, std::initializer_list<std::string> parts) {
  try {
    action();
  } catch (const Kind& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\nlacks: " << part;
    }
    return;
  }
  ADD_FAILURE() << "nothing was thrown";
}

}  // namespace fedshard::data
