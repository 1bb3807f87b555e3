#include "fedshard/data/token_file.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/unit/data/scratch.h"

namespace fedshard::data {
namespace {

using base::DamagedError;
using base::RunError;
using base::UsageError;

std::filesystem::path write_tokens(const std::string& name, const std::vector<std::vector<std::int32_t>>& documents) {
  const auto path = scratch(name);
  TokenFileWriter writer(path, ByteTokenizer());
  for (const auto& ids : documents) writer.add_document(ids);
  writer.finish(0);
  return path;
}

std::int64_t files_in(const std::filesystem::path& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

TEST(TokenFile, KeepsIdsDocumentsAndHeader) {
  const auto path = scratch("a.tokens");
  TokenFileWriter writer(path, ByteTokenizer());
  writer.add_document(std::vector<std::int32_t>{1, 2, 3});
  writer.add_document({});
  writer.add_document(std::vector<std::int32_t>{255});
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.finish(7);
  const TokenFile file(path);
  file.verify();
  const std::vector<std::int32_t> ids(file.tokens().begin(), file.tokens().end());
  EXPECT_EQ(ids, (std::vector<std::int32_t>{1, 2, 3, 256, 256, 255, 256}));
  EXPECT_EQ(file.info().tokens, 7);
  EXPECT_EQ(file.info().documents, 3);
  EXPECT_EQ(file.info().skipped, 7);
  EXPECT_EQ(file.info().vocab_size, 257);
  EXPECT_EQ(file.info().end_of_text, 256);
  EXPECT_EQ(file.info().max_id, 256);
  EXPECT_EQ(file.info().fingerprint, ByteTokenizer().fingerprint());
  EXPECT_EQ(std::filesystem::file_size(path), 4096 + 7 * 4);
  EXPECT_TRUE(looks_like_token_file(path));
  EXPECT_EQ(files_in(path.parent_path()), 1);
}

TEST(TokenFile, HoldsMoreThanOneBuffer) {
  std::vector<std::int32_t> ids(300'001);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 251);
  const TokenFile file(write_tokens("a.tokens", {ids, ids, {9}}));
  file.verify();
  ASSERT_EQ(file.info().tokens, 2 * 300'002 + 2);
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), file.tokens().begin() + 300'002));
  EXPECT_EQ(file.tokens()[600'004], 9);
}

TEST(TokenFile, AFileWithoutDocumentsHasNoLargestId) {
  const TokenFile file(write_tokens("a.tokens", {}));
  file.verify();
  EXPECT_TRUE(file.tokens().empty());
  EXPECT_EQ(file.info().max_id, -1);
}

TEST(TokenFile, AnUnfinishedWriterLeavesNothingAndKeepsTheOldFile) {
  const auto path = write_tokens("a.tokens", {{1}});
  const std::string before = read_scratch(path);
  {
    TokenFileWriter writer(path, ByteTokenizer());
    writer.add_document(std::vector<std::int32_t>(400'000, 5));
  }
  EXPECT_EQ(read_scratch(path), before);
  EXPECT_EQ(files_in(path.parent_path()), 1);
}

TEST(TokenFile, WritersOfOnePathDoNotDisturbEachOther) {
  const auto path = scratch("a.tokens");
  std::vector<std::thread> threads;
  for (std::int32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&path, t] {
      TokenFileWriter writer(path, ByteTokenizer());
      for (int i = 0; i < 100; ++i) writer.add_document(std::vector<std::int32_t>(999, t));
      writer.finish(0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const TokenFile file(path);
  file.verify();
  EXPECT_EQ(file.info().tokens, 100'000);
  EXPECT_EQ(files_in(path.parent_path()), 1);
}

TEST(TokenFile, CannotBeWrittenWhereThereIsNoFolder) {
  expect_error<RunError>([] { TokenFileWriter writer(scratch("none/a.tokens"), ByteTokenizer()); },
                         {"none/", "cannot create: No such file or directory"});
}

TEST(TokenFile, MissingAndForeignFiles) {
  expect_error<UsageError>([] { TokenFile file(scratch("missing")); }, {"missing: cannot open"});
  for (const std::string content : {"", "FEDSHTO", "some text that is longer than the magic is"}) {
    const auto path = write_scratch("foreign", content);
    EXPECT_FALSE(looks_like_token_file(path));
    expect_error<UsageError>([&] { TokenFile file(path); }, {"foreign: is not a token file", "data prepare"});
  }
}

TEST(TokenFile, TruncatedFiles) {
  const auto path = write_tokens("a.tokens", {{1, 2, 3}});
  const std::string whole = read_scratch(path);
  for (const std::size_t size : {whole.size() - 1, whole.size() - 4, std::size_t{4096}}) {
    expect_error<DamagedError>([&] { TokenFile file(write_scratch("cut.tokens", whole.substr(0, size))); },
                               {"cut.tokens: is truncated: 4 tokens need 4112 bytes, it has " + std::to_string(size)});
  }
  for (const std::size_t size : {std::size_t{4095}, std::size_t{8}}) {
    expect_error<DamagedError>([&] { TokenFile file(write_scratch("cut.tokens", whole.substr(0, size))); },
                               {"cut.tokens: is truncated", "less than its header", "prepare it again"});
  }
}

TEST(TokenFile, GrownFiles) {
  const std::string whole = read_scratch(write_tokens("a.tokens", {{1, 2, 3}}));
  expect_error<DamagedError>([&] { TokenFile file(write_scratch("more.tokens", whole + "x")); },
                             {"more.tokens: has grown: 4 tokens need 4112 bytes, it has 4113"});
}

TEST(TokenFile, OtherByteOrderAndVersion) {
  const std::string whole = read_scratch(write_tokens("a.tokens", {{1, 2, 3}}));
  std::string foreign = whole;
  std::reverse(foreign.begin() + 8, foreign.begin() + 12);
  expect_error<DamagedError>([&] { TokenFile file(write_scratch("b.tokens", foreign)); },
                             {"b.tokens: was written on a big-endian machine"});
  std::string newer = whole;
  newer[12] = 9;
  expect_error<DamagedError>([&] { TokenFile file(write_scratch("c.tokens", newer)); },
                             {"c.tokens: has format version 9", "reads version 1"});
}

TEST(TokenFile, EveryDamagedByteOfTheHeaderIsFound) {
  const std::string whole = read_scratch(write_tokens("a.tokens", {{1, 2, 3}}));
  for (std::size_t byte = 0; byte < 96; ++byte) {
    std::string damaged = whole;
    damaged[byte] ^= 0x10;
    const auto path = write_scratch("d.tokens", damaged);
    EXPECT_THROW(TokenFile{path}, base::Error) << "byte " << byte;
  }
}

TEST(TokenFile, ImpossibleCountsAreFoundBehindARightChecksum) {
  const std::string whole = read_scratch(write_tokens("a.tokens", {{1, 2, 3}}));
  // Four times the first two is 16 modulo 2^64, the size of the four ids that are there.
  for (const std::uint64_t tokens : {(std::uint64_t{1} << 62) + 4, (std::uint64_t{3} << 62) + 4, ~std::uint64_t{0}}) {
    std::string wrong = whole;
    std::memcpy(wrong.data() + 16, &tokens, sizeof(tokens));
    const std::uint64_t hash = std::stoull(hash_hex(wrong.substr(0, 88)), nullptr, 16);
    std::memcpy(wrong.data() + 88, &hash, sizeof(hash));
    expect_error<DamagedError>(
        [&] { TokenFile file(write_scratch("wrong.tokens", wrong)); },
        {"wrong.tokens: its header counts " + std::to_string(static_cast<std::int64_t>(tokens))});
  }
}

TEST(TokenFile, DamagedIdsAreFoundByVerify) {
  std::string content = read_scratch(write_tokens("a.tokens", {{1, 2, 3}}));
  content[4096 + 5] ^= 1;
  const TokenFile file(write_scratch("e.tokens", content));
  expect_error<DamagedError>([&] { file.verify(); }, {"e.tokens: its ids are damaged", "prepare it again"});
}

}  // namespace
}  // namespace fedshard::data
