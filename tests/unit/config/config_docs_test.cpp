#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "fedshard/base/file.h"
#include "fedshard/config/config.h"

namespace fedshard::config {
namespace {

// FEDSHARD_UPDATE_DOCS=1 in the environment makes the page anew instead of comparing.
TEST(ConfigurationPage, IsUpToDate) {
  const auto page = std::filesystem::path(__FILE__).parent_path() / "../../../docs/configuration.md";
  if (std::getenv("FEDSHARD_UPDATE_DOCS") != nullptr) base::write_file_atomically(page, configuration_page());
  EXPECT_TRUE(base::read_file(page) == configuration_page())
      << "docs/configuration.md is stale: run config_tests --gtest_filter='ConfigurationPage.*' with "
         "FEDSHARD_UPDATE_DOCS=1 in the environment";
}

}  // namespace
}  // namespace fedshard::config
