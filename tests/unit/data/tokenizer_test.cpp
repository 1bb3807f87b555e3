#include "fedshard/data/tokenizer.h"

#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "fedshard/data/bpe.h"
#include "fedshard/data/bpe_tokenizer.h"
#include "fedshard/data/pattern.h"
#include "tests/unit/data/scratch.h"

namespace fedshard::data {
namespace {

using base::DamagedError;
using base::UsageError;
using nlohmann::json;
using Ids = std::vector<std::int32_t>;

// How tokenizer files write byte `byte`.
std::string character_of(int byte) {
  int c = byte;
  if (byte < 0x21) c = 0x100 + byte;
  if (byte >= 0x7F && byte < 0xA1) c = 0x121 + byte - 0x7F;
  if (byte == 0xAD) c = 0x143;
  if (c < 0x80) return {static_cast<char>(c)};
  return {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
}

// GPT-2's kind, with ids 0 to 255 for the bytes, some merges, and end of text.
json definition() {
  json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[character_of(byte)] = byte;
  const std::vector<std::pair<std::string, std::string>> pairs{
      {"a", "b"}, {"b", "c"}, {"ab", "c"}, {"c", "d"}, {"Ġ", "ab"}};
  json merges = json::array();
  for (const auto& [left, right] : pairs) {
    vocab[left + right] = vocab.size();
    merges.push_back({left, right});
  }
  const json end{
      {"id", vocab.size()}, {"content", "<|endoftext|>"}, {"special", true}, {"normalized", false}, {"lstrip", false},
      {"rstrip", false},    {"single_word", false}};
  return {{"added_tokens", {end}},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"dropout", nullptr}, {"vocab", vocab}, {"merges", merges}}}};
}

std::unique_ptr<Tokenizer> load(const json& content) {
  return load_tokenizer(write_scratch("tokenizer.json", content.dump()).string());
}

constexpr std::int32_t kAb = 256, kBc = 257, kAbc = 258, kCd = 259, kSpaceAb = 260, kEnd = 261;

TEST(ByteTokenizer, BytesAreIds) {
  const auto tokenizer = load_tokenizer("byte");
  const std::string text("a\0\xFF\xC3\xA9", 5);
  EXPECT_EQ(tokenizer->encode(text), (Ids{97, 0, 255, 195, 169}));
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  EXPECT_TRUE(tokenizer->encode("").empty());
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->end_of_text(), 256);
  EXPECT_EQ(tokenizer->decode(Ids{97, 256, 98}), "a<|end_of_text|>b");
  EXPECT_EQ(tokenizer->fingerprint().size(), 16u);
  for (const std::int32_t id : {-1, 257}) {
    expect_error<UsageError>([&] { tokenizer->decode(Ids{id}); }, {"token id " + std::to_string(id)});
  }
}

TEST(BpeTokenizer, MergesByRankThenFromTheLeft) {
  const auto tokenizer = load(definition());
  EXPECT_EQ(tokenizer->vocab_size(), 262);
  EXPECT_EQ(tokenizer->end_of_text(), kEnd);
  EXPECT_EQ(tokenizer->encode("abc"), Ids{kAbc});
  EXPECT_EQ(tokenizer->encode("abcd"), (Ids{kAbc, 'd'}));  // (ab, c) is before (c, d)
  EXPECT_EQ(tokenizer->encode("bcd"), (Ids{kBc, 'd'}));
  EXPECT_EQ(tokenizer->encode("cdab"), (Ids{kCd, kAb}));
  EXPECT_EQ(tokenizer->encode("ab ab ab"), (Ids{kAb, kSpaceAb, kSpaceAb}));
  EXPECT_TRUE(tokenizer->encode("").empty());
  EXPECT_EQ(tokenizer->encode("a<|endoftext|>b"), (Ids{'a', kEnd, 'b'}));
  EXPECT_EQ(tokenizer->decode(Ids{kAbc, kSpaceAb, kEnd}), "abc ab<|endoftext|>");
  expect_error<UsageError>([&] { tokenizer->decode(Ids{262}); }, {"token id 262"});
}

TEST(BpeTokenizer, LongAndShortPiecesMergeAlike) {
  // The obvious algorithm: merge the first pair of the lowest rank until there is none.
  const std::vector<std::array<std::int32_t, 3>> merges{{0, 0, 2}, {0, 1, 3}, {2, 1, 4},
                                                        {2, 2, 5}, {1, 3, 6}, {5, 3, 7}};
  BpeDefinition bpe{};
  for (auto& id : bpe.byte_ids) id = 1;
  bpe.byte_ids['a'] = 0;
  for (const auto& [left, right, merged] : merges) bpe.merges.push_back({left, right, merged});
  Bpe fast(bpe);
  std::uint32_t random = 1;
  for (std::size_t length = 1; length < 90; ++length) {
    std::string piece;
    Ids expected, got;
    for (std::size_t i = 0; i < length; ++i) {
      random = random * 1664525 + 1013904223;
      piece += random >> 30 == 0 ? 'b' : 'a';
      expected.push_back(piece.back() == 'a' ? 0 : 1);
    }
    for (bool merged = true; merged;) {
      merged = false;
      for (std::size_t rank = 0; rank < merges.size() && !merged; ++rank) {
        for (std::size_t i = 0; i + 1 < expected.size() && !merged; ++i) {
          if (expected[i] != merges[rank][0] || expected[i + 1] != merges[rank][1]) continue;
          expected[i] = merges[rank][2];
          expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(i) + 1);
          merged = true;
        }
      }
    }
    for (int twice = 0; twice < 2; ++twice) {  // the second time short pieces are remembered
      got.clear();
      fast.append(piece, got);
      EXPECT_EQ(got, expected) << piece;
    }
  }
}

TEST(BpeTokenizer, InvalidUtf8DecodesToItself) {
  const auto tokenizer = load(definition());
  std::string every_byte;
  for (int byte = 0; byte < 256; ++byte) every_byte += static_cast<char>(byte);
  for (const std::string& text :
       {every_byte,
        std::string("ab\xFF"
                    "abc \xC3 ab"),
        std::string("\x80\x80\xE2\x82"), std::string("\xED\xA0\x80 ab"), std::string("\xF8\x88\x80\x80\x80")}) {
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
  EXPECT_EQ(tokenizer->encode("ab\xFF"
                              "abc"),
            (Ids{kAb, 255, kAbc}));
}

TEST(BpeTokenizer, IgnoreMergesTakesAWholePiece) {
  json content = definition();
  content["model"]["vocab"]["dcba"] = 261;
  content["added_tokens"][0]["id"] = 262;
  EXPECT_EQ(load(content)->encode("dcba"), (Ids{'d', 'c', 'b', 'a'}));
  content["model"]["ignore_merges"] = true;
  const auto tokenizer = load(content);
  EXPECT_EQ(tokenizer->encode("dcba"), Ids{261});
  EXPECT_EQ(tokenizer->encode(" dcba"), (Ids{' ', 'd', 'c', 'b', 'a'}));
}

TEST(BpeTokenizer, TheFingerprintIsOfTheDefinition) {
  const json content = definition();
  const std::string fingerprint = load(content)->fingerprint();
  EXPECT_EQ(load_tokenizer(write_scratch("t.json", content.dump(2)).string())->fingerprint(), fingerprint);
  json strings = content;
  for (json& merge : strings["model"]["merges"])
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  strings["post_processor"] = {{"type", "ByteLevel"}};
  EXPECT_EQ(load(strings)->fingerprint(), fingerprint);
  EXPECT_EQ(load(strings)->encode("abcd ab"), load(content)->encode("abcd ab"));

  std::vector<json> others(5, content);
  std::swap(others[0]["model"]["merges"][0], others[0]["model"]["merges"][1]);
  std::swap(others[1]["model"]["vocab"]["x"], others[1]["model"]["vocab"]["y"]);
  others[2]["model"]["ignore_merges"] = true;
  others[3]["pre_tokenizer"]["add_prefix_space"] = true;
  others[4]["added_tokens"][0]["normalized"] = true;
  for (const json& other : others) EXPECT_NE(load(other)->fingerprint(), fingerprint);
}

TEST(BpeTokenizer, EndOfTextIsTheFirstKnownName) {
  json content = definition();
  content["model"]["vocab"]["</s>"] = 261;
  content["added_tokens"][0]["id"] = 262;
  EXPECT_EQ(load(content)->end_of_text(), 262);
  json llama = content["added_tokens"][0];
  llama["content"] = "<|end_of_text|>";
  llama["id"] = 263;
  content["added_tokens"].push_back(llama);
  EXPECT_EQ(load(content)->end_of_text(), 263);
  content["added_tokens"] = json::array();
  EXPECT_EQ(load(content)->end_of_text(), 261);
  content["model"]["vocab"].erase("</s>");
  expect_error<UsageError>([&] { load(content); }, {"tokenizer.json: has no end-of-text token", "<|endoftext|>, </s>"});
}

TEST(BpeTokenizer, EncodesFromManyThreads) {
  const auto tokenizer = load(definition());
  std::vector<std::thread> threads;
  std::vector<Ids> ids(4);
  for (Ids& result : ids) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) result = tokenizer->encode("abc ab cd x" + std::string(100, 'b'));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Ids& result : ids) EXPECT_EQ(result, ids[0]);
}

void expect_refused(const std::string& pointer, const json& value, std::initializer_list<std::string> parts) {
  json content = definition();
  content[json::json_pointer(pointer)] = value;
  SCOPED_TRACE(pointer + " = " + value.dump());
  expect_error<UsageError>([&] { load(content); }, {"tokenizer.json"});
  expect_error<UsageError>([&] { load(content); }, parts);
}

TEST(TokenizerJson, RefusesByNameWhatItDoesNotSupport) {
  expect_refused("/normalizer", {{"type", "NFC"}}, {"a normalizer (NFC)"});
  expect_refused("/truncation", {{"max_length", 5}}, {"a truncation"});
  expect_refused("/padding", {{"strategy", "BatchLongest"}}, {"a padding"});
  expect_refused("/pre_tokenizer", nullptr, {"no pre_tokenizer"});
  expect_refused("/pre_tokenizer", {{"type", "Metaspace"}}, {"the pre_tokenizer Metaspace"});
  expect_refused("/pre_tokenizer", {{"type", "Digits"}, {"individual_digits", true}}, {"does not end with ByteLevel"});
  expect_refused("/decoder", {{"type", "WordPiece"}}, {"the decoder WordPiece"});
  expect_refused("/model/type", "Unigram", {"a model of type Unigram"});
  expect_refused("/model/dropout", 0.1, {"dropout in its model"});
  expect_refused("/model/byte_fallback", true, {"byte_fallback in its model"});
  expect_refused("/model/end_of_word_suffix", "</w>", {"end_of_word_suffix in its model"});
  expect_refused("/added_tokens/0/lstrip", true, {"<|endoftext|>\" with lstrip"});
  expect_refused("/added_tokens/0/single_word", true, {"<|endoftext|>\" with single_word"});
  const json split{{"type", "Split"}, {"behavior", "Removed"}, {"pattern", {{"Regex", "a"}}}};
  expect_refused("/pre_tokenizer", split, {"Split with the behavior Removed"});
  const json byte_level = definition()["pre_tokenizer"];
  expect_refused("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {byte_level, byte_level}}},
                 {"the pre_tokenizer ByteLevel after ByteLevel"});
  json content = definition();
  content["model"]["vocab"].erase("z");
  expect_error<UsageError>([&] { load(content); }, {"no token for the byte 122"});
}

void expect_damaged(const std::string& pointer, const json& value, const std::string& part) {
  json content = definition();
  content[json::json_pointer(pointer)] = value;
  SCOPED_TRACE(pointer + " = " + value.dump());
  expect_error<DamagedError>([&] { load(content); }, {"tokenizer.json: is not a sound tokenizer.json", part});
}

TEST(TokenizerJson, NamesWhatIsMalformed) {
  expect_damaged("/model/merges/0", "a b c", "merge 0 is \"a b c\"");
  expect_damaged("/model/merges/1", "ab", "merge 1 is \"ab\"");
  expect_damaged("/model/merges/1", json::array({"a"}), "merge 1 is not two tokens");
  expect_damaged("/model/merges/2", json::array({"a", "zz"}), "merge 2 needs the token \"zz\"");
  expect_damaged("/model/merges/2", json::array({"y", "z"}), "merge 2 needs the token \"yz\"");
  expect_damaged("/model/vocab/ab", -1, "token \"ab\" has the id -1");
  expect_damaged("/model/vocab/ab", 1.5, "token \"ab\" has the id 1.5");
  expect_damaged("/model/vocab/ab", 1e300, "token \"ab\" has the id 1e+300");
  expect_damaged("/model/vocab/ab", "x", "type must be number");
  expect_damaged("/model/vocab/ab", 7, "two tokens have the id 7");
  expect_damaged("/added_tokens/0/id", 300, "has the id 300, by its place it has 261");
  expect_damaged("/added_tokens/0/content", "", "the added token 261 is empty");
  expect_damaged("/added_tokens/0/content", "abc", "has the id 261, by its place it has 258");
  for (const std::string content : {"", "{", "[]", "{}", "{\"model\": 3}", "\x01\xFF"}) {
    EXPECT_THROW(load_tokenizer(write_scratch("tokenizer.json", content).string()), DamagedError) << content;
  }
  expect_error<UsageError>([] { load_tokenizer(scratch("none.json").string()); }, {"none.json: cannot open"});
}

TEST(TokenizerJson, RefusesDeepNesting) {
  for (const std::size_t depth : {std::size_t{66}, std::size_t{1} << 20}) {
    const auto path = write_scratch("deep.json", std::string(depth, '[') + std::string(depth, ']'));
    expect_error<DamagedError>([&] { load_tokenizer(path.string()); }, {"deep.json", "nested more than 64 deep"});
  }
}

TEST(Pattern, RefusesWhatTheLibrariesReadDifferently) {
  for (const char* pattern :
       {"^a",   "a$",      "a.b",     "\\w+",     "\\bx",         "\\h",   "[a[b]]",  "[a&&b]",
        "[]a]", "a{2}+",   "a{2,3}?", "a{,3}",    "(?<=a)b",      "(?m)a", "(?<n>a)", "\\p{Greek}",
        "\\pL", "\\p{^L}", "[^\\S]",  "[\\P{L}]", "(?i:\\p{Lu})", "a\\",   "\\1",     "(*UCP)a"}) {
    expect_error<UsageError>([&] { pcre2_of_oniguruma(pattern, "t.json"); },
                             {"t.json: the pattern", "does not support"});
  }
  expect_error<UsageError>([] { pcre2_of_oniguruma("[ab", "t.json"); }, {"lacks a \"]\""});
  for (const char* pattern : {"(a", "a)", "a**b", "(?i:a))"}) {
    expect_error<UsageError>([&] { Pattern(pcre2_of_oniguruma(pattern, "t.json"), "t.json"); },
                             {"t.json: PCRE2 cannot compile the pattern"});
  }
}

TEST(Pattern, FindsFromAnyPlaceAndSurvivesLongTexts) {
  const Pattern blanks(pcre2_of_oniguruma("\\s+(?!\\S)|\\s+", "t"), "t");
  Match match{};
  ASSERT_TRUE(blanks.find("a  b ", 0, match));
  EXPECT_EQ(match.begin, 1u);
  EXPECT_EQ(match.end, 2u);
  EXPECT_FALSE(blanks.find("abc", 0, match));
  EXPECT_FALSE(blanks.find("", 0, match));
  EXPECT_FALSE(blanks.find("\xE1\xA0\x8E", 0, match));  // U+180E is no white space
  const std::string text = std::string(20'000'000, ' ') + "x";
  ASSERT_TRUE(blanks.find(text, 0, match));
  EXPECT_EQ(match.end, text.size() - 2);
  const Pattern groups(pcre2_of_oniguruma("(?:ab|a)+c", "t"), "t");
  EXPECT_FALSE(groups.find(std::string(20'000, 'a'), 19'000, match));
}

TEST(Pattern, ALiteralMatchesOnlyItself) {
  const std::string text = "a.b*[\\](){}^$|?+ \xC3\xA9";
  const Pattern literal(pcre2_of_literal(text), "t");
  Match match{};
  ASSERT_TRUE(literal.find("x" + text, 0, match));
  EXPECT_EQ(match.begin, 1u);
  EXPECT_EQ(match.end, 1 + text.size());
}

TEST(StringFinder, LeftmostThenLongest) {
  StringFinder finder;
  int id = 0;
  for (const char* text : {"ab", "abc", "b", "bcd"}) finder.add(text, id++);
  std::string seen;
  finder.split(
      "xabcdb", [&](int found) { seen += "<" + std::to_string(found) + ">"; },
      [&](std::string_view between) { seen += between; });
  EXPECT_EQ(seen, "x<1>d<2>");
}

}  // namespace
}  // namespace fedshard::data
