#include "fedshard/data/prepare.h"

#include <thread>
#include <vector>

#include "tests/unit/data/scratch.h"

namespace fedshard::data {
namespace {

using base::DamagedError;
using base::UsageError;
using Texts = std::vector<std::string>;

constexpr auto kFail = BadRecords::fail;
constexpr auto kSkip = BadRecords::skip;

struct Documents {
  Texts texts;
  std::int64_t skipped;
};

Documents documents_of(const std::string& content, TextKind kind, BadRecords policy) {
  std::istringstream input(content);
  const auto reader = read_documents(input, "x.jsonl", kind, policy);
  Documents documents{};
  for (std::string text; reader->next(text);) documents.texts.push_back(text);
  EXPECT_EQ(reader->bytes_read(), static_cast<std::int64_t>(content.size()));
  documents.skipped = reader->skipped();
  return documents;
}

Texts jsonl(const std::string& content) { return documents_of(content, TextKind::jsonl, kFail).texts; }

// The documents of a token file that the byte tokenizer made.
Texts documents_in(const std::filesystem::path& path) {
  const TokenFile file(path);
  file.verify();
  Texts texts;
  std::string text;
  for (const std::int32_t id : file.tokens()) {
    if (id != ByteTokenizer::kEndOfText) {
      text += static_cast<char>(id);
      continue;
    }
    texts.push_back(std::exchange(text, {}));
  }
  EXPECT_EQ(text, "");
  EXPECT_EQ(file.info().documents, static_cast<std::int64_t>(texts.size()));
  return texts;
}

std::int64_t files_in(const std::filesystem::path& folder, const std::string& extension) {
  std::int64_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) n += entry.path().extension() == extension;
  return n;
}

TEST(Documents, APlainTextIsOneDocumentByteForByte) {
  const std::string long_text(3'000'000, 'x');
  for (const std::string& content : {std::string(),
                                     std::string("\xEF\xBB\xBF"
                                                 "a\r\nb\0\xFF\n",
                                                 9),
                                     long_text}) {
    EXPECT_EQ(documents_of(content, TextKind::plain, kFail).texts, Texts{content});
  }
}

TEST(Documents, ToleratesTheWaysToWriteJsonLines) {
  EXPECT_EQ(jsonl(""), Texts{});
  EXPECT_EQ(jsonl("\n\r\n  \t\n"), Texts{});
  EXPECT_EQ(jsonl("{\"text\": \"a\"}"), Texts{"a"});
  EXPECT_EQ(jsonl("\xEF\xBB\xBF{\"text\": \"a\"}\r\n\r\n {\"id\": 3, \"text\": \"\"} \n\n{\"text\":\"\\u00e9\\n\"}"),
            (Texts{"a", "", "\xC3\xA9\n"}));
  EXPECT_EQ(jsonl("{\"text\": \"\\ud83d\\ude00 \\u0000 \\u2028\"}\n"),
            Texts{std::string("\xF0\x9F\x98\x80 \0 \xE2\x80\xA8", 10)});
}

TEST(Documents, LinesOfEveryLengthAroundTheBlockSize) {
  std::string content;
  Texts expected;
  for (const std::size_t length : {1u << 20, (1u << 20) - 13, 1u, (1u << 20) + 7, 5'000'000u, 0u, 3u}) {
    expected.emplace_back(length, 'y');
    content += "{\"text\": \"" + expected.back() + "\"}\n";
  }
  EXPECT_EQ(jsonl(content), expected);
  content.pop_back();
  EXPECT_EQ(jsonl(content), expected);
}

TEST(Documents, BadRecordsAreNamedByLineOrCounted) {
  const std::string good = "{\"text\": \"good\"}\n";
  const std::vector<std::pair<std::string, std::string>> bad{
      {"{\"text\": \"a\"}{\"text\": \"b\"}", "is not one JSON value"},
      {"{\"text\": \"a\"", "is not one JSON value"},
      {"{\"text\": \"a\"},", "is not one JSON value"},
      {"plain words", "is not one JSON value"},
      {std::string("\0", 1), "is not one JSON value"},
      {"{\"text\": \"\xFF\"}", "is not one JSON value"},
      {"{\"text\": \"\\ud83d\"}", "is not one JSON value"},
      {"{\"text\": \"\\ude00\"}", "is not one JSON value"},
      {"{\"text\": \"a\tb\"}", "is not one JSON value"},
      {"{\"text\": null}", "its \"text\" is not a string"},
      {"{\"text\": 3.5}", "its \"text\" is not a string"},
      {"{\"text\": [\"a\"]}", "its \"text\" is not a string"},
      {"{\"content\": \"a\"}", "has no field \"text\""},
      {"{}", "has no field \"text\""},
      {"[1, 2]", "is not a JSON object"},
      {"\"text\"", "is not a JSON object"},
      {"null", "is not a JSON object"},
      {std::string(5'000, '['), "is not one JSON value"},
  };
  for (const auto& [line, problem] : bad) {
    const std::string content = good + "\n" + line + "\n" + good;
    expect_error<DamagedError>([&] { jsonl(content); }, {"x.jsonl:3: " + problem, "--bad-records skip"});
    const Documents rest = documents_of(content, TextKind::jsonl, kSkip);
    EXPECT_EQ(rest.texts, (Texts{"good", "good"})) << line;
    EXPECT_EQ(rest.skipped, 1) << line;
  }
}

TEST(Documents, KindsAndPolicies) {
  EXPECT_EQ(kind_of_text("a/b.txt"), TextKind::plain);
  EXPECT_EQ(kind_of_text("a/b.jsonl"), TextKind::jsonl);
  for (const char* name : {"a.parquet", "a.txt.gz", "a", "a.JSONL"}) {
    expect_error<UsageError>([&] { kind_of_text(name); }, {name, ".txt and .jsonl"});
  }
  EXPECT_EQ(parse_bad_records("skip"), kSkip);
  EXPECT_EQ(parse_bad_records("fail"), kFail);
  expect_error<UsageError>([] { parse_bad_records("ignore"); }, {"\"ignore\"", "fail or skip"});
}

TEST(Prepare, WritesAllDocumentsInOrder) {
  const auto a = write_scratch("a.txt", "first");
  const auto b = write_scratch("b.jsonl", "{\"text\": \"second\"}\nbroken\n{\"text\": \"\"}\n");
  const auto out = scratch("out.tokens");
  std::vector<PrepareProgress> seen;
  const TokenFileInfo info =
      prepare_token_file({a, b, a}, out, ByteTokenizer(), kSkip, [&](const PrepareProgress& p) { seen.push_back(p); });
  EXPECT_EQ(documents_in(out), (Texts{"first", "second", "", "first"}));
  EXPECT_EQ(info.skipped, 1);
  EXPECT_EQ(TokenFile(out).info().skipped, 1);
  EXPECT_EQ(info.tokens, 5 + 6 + 5 + 4);
  ASSERT_EQ(seen.size(), 3u);
  EXPECT_EQ(seen.back().bytes, seen.back().total_bytes);
  EXPECT_EQ(seen.back().tokens, info.tokens);
  EXPECT_EQ(seen.back().documents, 4);
}

TEST(Prepare, InvalidUtf8IsKeptByTheByteTokenizer) {
  const auto a = write_scratch("a.txt", "a\xFF\xC3");
  const auto out = scratch("out.tokens");
  prepare_token_file({a}, out, ByteTokenizer(), kFail);
  EXPECT_EQ(documents_in(out), Texts{"a\xFF\xC3"});
}

TEST(Prepare, AFailureLeavesNothingBehind) {
  const auto good = write_scratch("a.txt", "first");
  const auto bad = write_scratch("b.jsonl", "{\"text\": \"x\"}\n{\"text\": 1}\n");
  const auto out = scratch("out.tokens");
  expect_error<DamagedError>(
      [&] {
        prepare_token_file({good, bad}, out, ByteTokenizer(), kFail);
      },
      {bad.string() + ":2: its \"text\" is not a string"});
  expect_error<UsageError>(
      [&] {
        prepare_token_file({good, scratch("no.txt")}, out, ByteTokenizer(), kFail);
      },
      {"no.txt: cannot open"});
  expect_error<UsageError>(
      [&] { prepare_token_file({write_scratch("c.jsonl", "\n1\n")}, out, ByteTokenizer(), kSkip); },
      {"out.tokens: nothing to write", "1 record skipped"});
  EXPECT_FALSE(std::filesystem::exists(out));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(out.parent_path()), {}), 3);
}

TEST(Prepare, DoesNotOverwriteATextWithTokens) {
  const auto text = write_scratch("a.txt", "first");
  expect_error<UsageError>([&] { prepare_token_file({text}, text, ByteTokenizer(), kFail); },
                           {"a.txt: exists and is not a token file"});
  EXPECT_EQ(read_scratch(text), "first");
  const auto out = scratch("out.tokens");
  prepare_token_file({text}, out, ByteTokenizer(), kFail);
  prepare_token_file({text, text}, out, ByteTokenizer(), kFail);
  EXPECT_EQ(documents_in(out).size(), 2u);
}

TEST(ExpandGlobs, SortsMatchesAndKeepsTheOrderOfPatterns) {
  for (const char* name : {"b2.txt", "b10.txt", "B.txt", "a[1].txt"}) write_scratch(name, "");
  const auto folder = scratch("").parent_path();
  const auto at = [&](const char* name) { return (folder / name).string(); };
  std::vector<std::string> found;
  for (const auto& path : expand_globs({at("b*.txt"), at("a[1].txt"), at("?.txt")})) {
    found.push_back(path.filename().string());
  }
  EXPECT_EQ(found, (Texts{"b10.txt", "b2.txt", "a[1].txt", "B.txt"}));
  for (const char* none : {"none*.txt", "none.txt"}) {
    expect_error<UsageError>([&] { expand_globs({at("b2.txt"), at(none)}); }, {at(none), "no such file"});
  }
  expect_error<UsageError>([&] { expand_globs({folder.string()}); }, {folder.string(), "is a folder"});
}

TEST(ResolveData, PreparesRawTextOnceAndTakesTokenFilesAsTheyAre) {
  const auto text = write_scratch("a.txt", "first");
  const auto tokens = scratch("b.tokens");
  prepare_token_file({text, text}, tokens, ByteTokenizer(), kFail);
  const auto cache = scratch("cache/deep");
  int prepared = 0;
  const PrepareCallback count = [&](const PrepareProgress&) { ++prepared; };
  const auto resolve = [&] {
    return resolve_data({text.string(), tokens.string()}, ByteTokenizer(), cache, kFail, count);
  };
  const auto files = resolve();
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].parent_path(), cache);
  EXPECT_EQ(documents_in(files[0]), Texts{"first"});
  EXPECT_EQ(files[1], tokens);
  EXPECT_EQ(resolve(), files);
  EXPECT_EQ(prepared, 1);
  EXPECT_EQ(files_in(cache, ".verified"), 2);

  write_scratch("a.txt", "another");  // of another size
  const auto again = resolve();
  EXPECT_NE(again[0], files[0]);
  EXPECT_EQ(documents_in(again[0]), Texts{"another"});
  std::filesystem::last_write_time(text, std::filesystem::last_write_time(text) + std::chrono::seconds(2));
  EXPECT_NE(resolve()[0], again[0]);
}

TEST(ResolveData, ThePolicyIsPartOfTheCachesKey) {
  const auto text = write_scratch("a.jsonl", "{\"text\": \"x\"}\n{}\n");
  const auto cache = scratch("cache");
  EXPECT_EQ(documents_in(resolve_data({text.string()}, ByteTokenizer(), cache, kSkip).at(0)), Texts{"x"});
  EXPECT_THROW(resolve_data({text.string()}, ByteTokenizer(), cache, kFail), DamagedError);
}

TEST(ResolveData, FindsDamageOnFirstUse) {
  const auto text = write_scratch("a.txt", "first");
  const auto tokens = scratch("b.tokens");
  prepare_token_file({text}, tokens, ByteTokenizer(), kFail);
  std::string content = read_scratch(tokens);
  content[4097] ^= 4;
  write_scratch("b.tokens", content);
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_error<DamagedError>([&] { resolve_data({tokens.string()}, ByteTokenizer(), scratch("cache"), kFail); },
                               {"b.tokens: its ids are damaged"});
  }
}

TEST(ResolveData, RefusesTokenFilesOfAnotherTokenizer) {
  class Other final : public Tokenizer {
   public:
    std::vector<std::int32_t> encode(std::string_view) const override { return {}; }
    std::string decode(std::span<const std::int32_t>) const override { return ""; }
    std::int64_t vocab_size() const override { return 1; }
    std::int32_t end_of_text() const override { return 0; }
    std::string fingerprint() const override { return "0123456789abcdef"; }
  };
  const auto tokens = scratch("b.tokens");
  prepare_token_file({write_scratch("a.txt", "first")}, tokens, Other(), kFail);
  expect_error<UsageError>([&] { resolve_data({tokens.string()}, ByteTokenizer(), scratch("cache"), kFail); },
                           {"b.tokens", "0123456789abcdef", ByteTokenizer().fingerprint()});
}

TEST(ResolveData, RefusesOtherKindsOfFiles) {
  const auto path = write_scratch("a.parquet", "PAR1");
  expect_error<UsageError>([&] { resolve_data({path.string()}, ByteTokenizer(), scratch("cache"), kFail); },
                           {"a.parquet: is no token file, and of texts fedshard reads .txt and .jsonl"});
}

TEST(ResolveData, ManyAtOnceGetTheSameFile) {
  const auto text = write_scratch("a.txt", std::string(300'000, 'z'));
  std::vector<std::filesystem::path> files(4);
  std::vector<std::thread> threads;
  for (auto& file : files) {
    threads.emplace_back([&file, &text] {
      file = resolve_data({text.string()}, ByteTokenizer(), text.parent_path() / "cache", kFail).at(0);
      TokenFile(file).verify();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& file : files) EXPECT_EQ(file, files[0]);
  EXPECT_EQ(files_in(files[0].parent_path(), ".tokens"), 1);
  EXPECT_EQ(files_in(files[0].parent_path(), ".tmp"), 0);
}

}  // namespace
}  // namespace fedshard::data
