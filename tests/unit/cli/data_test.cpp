#include "fedshard/cli/data.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>

#include "fedshard/base/error.h"

namespace fedshard::cli {
namespace {

class DataCommand : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(testing::TempDir()) / fmt::format("fedshard-cli-data-{}", ::getpid()) /
              testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::create_directories(folder_);
  }
  std::filesystem::path write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return folder_ / name;
  }
  template <class Command>
  static std::string output_of(const Command& command) {
    testing::internal::CaptureStdout();
    EXPECT_EQ(command(), 0);
    return testing::internal::GetCapturedStdout();
  }
  // A token file of `n` letters and the end of text.
  std::filesystem::path prepare(const std::string& name, std::size_t n) {
    const auto text = write(name + ".txt", std::string(n, 'x'));
    output_of([&] { return data_prepare({.inputs = {text.string()}, .output = folder_ / name}); });
    return folder_ / name;
  }
  std::filesystem::path folder_;
};

TEST_F(DataCommand, PreparesAndInspects) {
  const auto a = write("a.txt", "first\n");
  const auto b = write("b.jsonl", "{\"text\": \"sec\\u0007nd\"}\n[]\n");
  const auto out = folder_ / "out.tokens";
  const std::string said = output_of([&] {
    return data_prepare({.inputs = {a.string(), b.string()}, .output = out, .bad_records = "skip"});
  });
  EXPECT_EQ(said, out.string() + ": 2 documents, 14 tokens, 1 records skipped\n");
  const std::string seen = output_of([&] { return data_inspect({.files = {out}, .tokenizer = "byte", .head = 13}); });
  EXPECT_NE(seen.find("14 tokens, 2 documents, 1 records skipped, ids up to 256\n"), std::string::npos) << seen;
  EXPECT_NE(seen.find("vocab_size 257, end of text 256\n"), std::string::npos) << seen;
  EXPECT_NE(seen.find("text: \"first\\n<|end_of_text|>sec\\x07nd\"\n"), std::string::npos) << seen;
  EXPECT_EQ(output_of([&] { return data_inspect({.files = {out}}); }).find("text:"), std::string::npos);
}

TEST_F(DataCommand, InspectFindsDamageAndMissingFiles) {
  const auto out = prepare("a.tokens", 9);
  {
    std::fstream file(out, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4096 + 8);
    file.put('q');
  }
  EXPECT_THROW(output_of([&] { return data_inspect({.files = {out}}); }), base::DamagedError);
  testing::internal::GetCapturedStdout();
  EXPECT_THROW(data_inspect({.files = {folder_ / "none"}}), base::UsageError);
}

TEST_F(DataCommand, TheLedgerCountsPositionsEpochsAndSequences) {
  const auto a = prepare("a.tokens", 6), b = prepare("b.tokens", 5);  // 13 tokens: 4 sequences of 3
  const DataInspectArgs args{.files = {a, b}, .order = 10, .seed = 3, .seq_len = 3};
  std::istringstream lines(output_of([&] { return data_inspect(args); }));
  std::string line;
  std::multiset<std::int64_t> first_epochs;
  std::int64_t next = 0;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::int64_t position = 0, epoch = 0, sequence = 0;
    if (!(words >> position >> epoch >> sequence)) continue;  // a line of a header
    EXPECT_EQ(position, next++);
    EXPECT_EQ(epoch, position / 4);
    if (position < 8) first_epochs.insert(sequence);
  }
  EXPECT_EQ(next, 10);
  EXPECT_EQ(first_epochs, (std::multiset<std::int64_t>{0, 0, 1, 1, 2, 2, 3, 3}));
  EXPECT_THROW(output_of([&] { return data_inspect({.files = {a}, .order = 1, .seq_len = 7}); }), base::UsageError);
  testing::internal::GetCapturedStdout();
}

TEST_F(DataCommand, EncodesADocumentALine) {
  const auto text = write("a.txt", "ab\n");
  EXPECT_EQ(output_of([&] { return data_encode({.input = text}); }), "97 98 10\n");
  const auto lines = write("b", "{\"text\": \"ab\"}\n\n{\"text\": \"\"}\n{\"text\": \"c\"}");
  EXPECT_EQ(output_of([&] { return data_encode({.input = lines, .jsonl = true}); }), "97 98\n\n99\n");
  EXPECT_THROW(data_encode({.input = folder_ / "none"}), base::UsageError);
  EXPECT_THROW(data_encode({.tokenizer = (folder_ / "none.json").string(), .input = text}), base::UsageError);
}

}  // namespace
}  // namespace fedshard::cli
