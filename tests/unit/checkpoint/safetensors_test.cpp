#include "fedshard/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "fedshard/base/error.h"
#include "tests/unit/checkpoint/scratch.h"

namespace fedshard::checkpoint {
namespace {

using base::DamagedError;

std::span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void write_raw(const std::filesystem::path& path, std::uint64_t length, const std::string& header,
               const std::string& data) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file << header << data;
}

// A file with this header and data must be refused with a message that names the file and contains `part`.
void expect_damaged(const std::string& header, const std::string& data, const std::string& part) {
  const Scratch scratch;
  write_raw(scratch / "x.safetensors", header.size(), header, data);
  try {
    const SafetensorsFile file(scratch / "x.safetensors");
    ADD_FAILURE() << "accepted: " << header;
  } catch (const DamagedError& e) {
    const std::string message = e.what();
    EXPECT_NE(message.find("x.safetensors: "), std::string::npos) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

TEST(Safetensors, WhatIsWrittenIsRead) {
  const Scratch scratch;
  const std::string eight = "abcdefgh";
  write_safetensors(scratch / "x.safetensors",
                    {{"matrix", {"BF16", {2, 2}, bytes_of(eight)}},
                     {"scalar", {"F32", {}, bytes_of("wxyz")}},
                     {"empty", {"I64", {3, 0}, {}}},
                     {"byte", {"U8", {1}, bytes_of("!")}}},
                    {{"format", "pt"}});
  const SafetensorsFile file(scratch / "x.safetensors");
  EXPECT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_EQ(text_of(file.at("matrix").bytes), eight);
  EXPECT_EQ(file.at("matrix").shape, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(file.at("matrix").numel(), 4);
  EXPECT_EQ(text_of(file.at("scalar").bytes), "wxyz");
  EXPECT_EQ(file.at("scalar").numel(), 1);
  EXPECT_EQ(file.at("empty").numel(), 0);
  EXPECT_EQ(file.at("byte").dtype, "U8");
  EXPECT_THROW(file.at("none"), DamagedError);
}

TEST(Safetensors, AFileOfNoTensors) {
  const Scratch scratch;
  write_safetensors(scratch / "x.safetensors", {});
  EXPECT_TRUE(SafetensorsFile(scratch / "x.safetensors").tensors().empty());
}

TEST(Safetensors, EntriesSurviveAMoveOfTheFile) {
  const Scratch scratch;
  write_safetensors(scratch / "x.safetensors", {{"t", {"U8", {3}, bytes_of("abc")}}});
  SafetensorsFile first(scratch / "x.safetensors");
  const TensorEntry* entry = &first.at("t");
  const SafetensorsFile second(std::move(first));
  EXPECT_EQ(entry, &second.at("t"));
  EXPECT_EQ(text_of(entry->bytes), "abc");
}

// A hole in a file takes no space on the disk.
TEST(Safetensors, TensorsMayHaveMoreElementsThan32BitsCount) {
  const Scratch scratch;
  constexpr std::int64_t kRows = (std::int64_t{1} << 32) + 3, kBytes = kRows * 2;
  const std::string header =
      fmt::format(R"({{"large":{{"dtype":"BF16","shape":[{}],"data_offsets":[0,{}]}},)", kRows, kBytes) +
      fmt::format(R"("after":{{"dtype":"F32","shape":[1],"data_offsets":[{},{}]}}}})", kBytes, kBytes + 4);
  write_raw(scratch / "x.safetensors", header.size(), header, "");
  const auto data = 8 + static_cast<std::int64_t>(header.size());
  std::filesystem::resize_file(scratch / "x.safetensors", static_cast<std::uintmax_t>(data + kBytes - 2));
  std::ofstream(scratch / "x.safetensors", std::ios::binary | std::ios::app) << "endwxyz";
  EXPECT_THROW(SafetensorsFile(scratch / "x.safetensors"), DamagedError);  // a byte too many
  std::filesystem::resize_file(scratch / "x.safetensors", static_cast<std::uintmax_t>(data + kBytes - 2));
  std::ofstream(scratch / "x.safetensors", std::ios::binary | std::ios::app) << "edwxyz";
  const SafetensorsFile file(scratch / "x.safetensors");
  EXPECT_EQ(file.at("large").numel(), kRows);
  EXPECT_EQ(static_cast<std::int64_t>(file.at("large").bytes.size()), kBytes);
  EXPECT_EQ(text_of(file.at("large").bytes.last(2)), "ed");
  EXPECT_EQ(text_of(file.at("after").bytes), "wxyz");
}

TEST(Safetensors, FilesThatAreShorterThanTheySay) {
  const Scratch scratch;
  for (const std::string& content : {std::string(), std::string("short"), std::string(8, '\xff')}) {
    std::ofstream(scratch / "x.safetensors", std::ios::binary) << content;
    EXPECT_THROW(SafetensorsFile(scratch / "x.safetensors"), DamagedError);
  }
  write_raw(scratch / "x.safetensors", 3, "{}", "");
  EXPECT_THROW(SafetensorsFile(scratch / "x.safetensors"), DamagedError);
  EXPECT_THROW(SafetensorsFile(scratch / "missing"), base::UsageError);
}

// Every truncation of a good file is noticed.
TEST(Safetensors, AnyTruncationIsDamage) {
  const Scratch scratch;
  write_safetensors(scratch / "x.safetensors",
                    {{"a", {"U8", {3}, bytes_of("abc")}}, {"b", {"F32", {1}, bytes_of("wxyz")}}});
  const auto size = std::filesystem::file_size(scratch / "x.safetensors");
  for (auto left = size; left-- > 0;) {
    std::filesystem::resize_file(scratch / "x.safetensors", left);
    EXPECT_THROW(SafetensorsFile(scratch / "x.safetensors"), DamagedError) << left << " of " << size;
  }
}

TEST(Safetensors, BrokenHeaders) {
  expect_damaged("", "", "no JSON");
  expect_damaged("{\"a\": ", "", "no JSON");
  expect_damaged("[]", "", "no JSON object");
  expect_damaged(R"({"a":1})", "", "tensor 'a': its header entry is no object");
  expect_damaged(R"({"__metadata__":{"k":1}})", "", "__metadata__ is no map of strings");
  expect_damaged(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
      "x", "has tensor 'a' twice");
  expect_damaged(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "x", "has key 'dtype' twice");
}

TEST(Safetensors, TheSameKeyInTwoTensorsIsNoDuplicate) {
  const Scratch scratch;
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})";
  write_raw(scratch / "x.safetensors", header.size(), header, "xy");
  EXPECT_EQ(text_of(SafetensorsFile(scratch / "x.safetensors").at("b").bytes), "y");
}

TEST(Safetensors, BrokenEntries) {
  const auto entry = [](const std::string& keys) { return R"({"a":{)" + keys + "}}"; };
  expect_damaged(entry(R"("shape":[1],"data_offsets":[0,1])"), "x", "tensor 'a': has no dtype");
  expect_damaged(entry(R"("dtype":"F5","shape":[1],"data_offsets":[0,1])"), "x", "unknown dtype 'F5'");
  expect_damaged(entry(R"("dtype":"U8","data_offsets":[0,1])"), "x", "its shape is no list");
  expect_damaged(entry(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])"), "x", "its shape is no list");
  expect_damaged(entry(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])"), "x", "its shape is no list");
  expect_damaged(entry(R"("dtype":"U8","shape":[1])"), "x", "its data_offsets are no two offsets");
  expect_damaged(entry(R"("dtype":"U8","shape":[1],"data_offsets":[0])"), "x", "no two offsets");
  expect_damaged(entry(R"("dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551615])"), "x", "no two offsets");
  expect_damaged(entry(R"("dtype":"U8","shape":[1],"data_offsets":[1,0])"), "x", "bytes [1, 0) lie outside");
  expect_damaged(entry(R"("dtype":"U8","shape":[2],"data_offsets":[0,2])"), "x", "bytes [0, 2) lie outside");
  expect_damaged(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), "abcd",
                 "has 4 bytes, but its shape needs 8");
  expect_damaged(entry(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4])"), "abcd",
                 "needs more than 64 bits can count");
}

TEST(Safetensors, TensorsMustCoverTheDataExactly) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}";
  };
  expect_damaged(two("[0,2]", "[1,3]"), "xyz", "tensor 'b' overlaps");
  expect_damaged(two("[0,2]", "[0,2]"), "xy", "overlaps");
  expect_damaged(two("[0,2]", "[3,5]"), "vwxyz", "1 bytes before tensor 'b' belong to no tensor");
  expect_damaged(two("[2,4]", "[0,2]"), "vwxyz", "the last 1 bytes belong to no tensor");
  expect_damaged("{}", "x", "the last 1 bytes belong to no tensor");
}

TEST(Safetensors, AFailedWriteLeavesNothing) {
  const Scratch scratch;
  std::filesystem::create_directories(scratch / "taken" / "inside");
  EXPECT_THROW(write_safetensors(scratch / "taken", {}), base::RunError);
  EXPECT_THROW(write_safetensors(scratch / "no" / "folder", {}), base::RunError);
  EXPECT_THROW(write_safetensors(scratch / "x", {{"t", {"F32", {2}, bytes_of("abcd")}}}), base::RunError);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(scratch.folder()), {}), 1);
}

}  // namespace
}  // namespace fedshard::checkpoint
