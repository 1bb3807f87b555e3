#include "fedshard/base/file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "fedshard/base/error.h"

namespace fedshard::base {
namespace {

std::filesystem::path scratch(const std::string& name) {
  const auto folder = std::filesystem::path(testing::TempDir()) / fmt::format("fedshard-file-{}", ::getpid());
  std::filesystem::create_directories(folder);
  return folder / name;
}

TEST(File, AtomicWriteLeavesNoTemporaryFile) {
  const auto path = scratch("a/b.txt");
  std::filesystem::create_directories(path.parent_path());
  write_file_atomically(path, "one");
  write_file_atomically(path, "two");
  EXPECT_EQ(read_file(path), "two");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path.parent_path()), {}), 1);
}

TEST(File, AFailedAtomicWriteKeepsTheOldContent) {
  const auto folder = scratch("folder-in-the-way");
  std::filesystem::create_directories(folder / "x");
  EXPECT_THROW(write_file_atomically(folder, "text"), RunError);
  EXPECT_TRUE(std::filesystem::exists(folder / "x"));
  EXPECT_FALSE(std::filesystem::exists(temporary_beside(folder)));
}

TEST(File, MapsEmptyAndMissingFiles) {
  const auto path = scratch("empty");
  std::ofstream{path}.close();
  EXPECT_TRUE(MappedFile(path).bytes().empty());
  try {
    const MappedFile file(scratch("missing"));
    FAIL() << "a missing file was mapped";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), ExitStatus::usage);
    EXPECT_NE(std::string(e.what()).find("missing: cannot open: No such file"), std::string::npos);
  }
}

}  // namespace
}  // namespace fedshard::base
