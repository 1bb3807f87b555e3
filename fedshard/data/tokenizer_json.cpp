#include "fedshard/data/tokenizer_json.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"
#include "fedshard/data/bpe_tokenizer.h"
#include "fedshard/data/unicode_additions.h"

namespace fedshard::data {
namespace {

using nlohmann::json;

constexpr const char* kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr int kMostNested = 64;  // the JSON library reads any depth, but writes by recursion; so are stages added
constexpr std::array<const char*, 3> kEndOfText{"<|end_of_text|>", "<|endoftext|>", "</s>"};

// GPT-2's printable characters for bytes: a byte that prints in Latin-1 is itself, the others are U+0100 onwards.
std::map<std::string, unsigned char> bytes_of_characters() {
  std::map<std::string, unsigned char> bytes;
  unsigned next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool prints = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const unsigned c = prints ? byte : next++;
    std::string utf8;
    if (c < 0x80) {
      utf8 = static_cast<char>(c);
    } else {
      utf8 = {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
    }
    bytes[utf8] = static_cast<unsigned char>(byte);
  }
  return bytes;
}

// Turns the JSON of one file into a definition.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : file_(path.string()) {}

  TokenizerDefinition read(const json& root) {
    refuse_unsupported(root);
    read_vocabulary(root.at("model"));
    read_merges(root.at("model"));
    bool byte_level = false;
    add_stages(root.at("pre_tokenizer"), byte_level);
    if (!byte_level) refuse("a pre_tokenizer that does not end with ByteLevel");
    describe("pre_tokenizer", root.at("pre_tokenizer").dump());
    if (root.contains("added_tokens")) read_added_tokens(root.at("added_tokens"));
    finish();
    return std::move(definition_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    base::fail<base::UsageError>(
        "{}: has {}, which fedshard does not support (it reads byte-level BPE as of GPT-2 and "
        "Llama 3); choose another tokenizer.json",
        file_, what);
  }

  template <class... Args>
  [[noreturn]] void damaged(fmt::format_string<Args...> format, Args&&... args) const {
    base::fail<base::DamagedError>("{}: is not a sound tokenizer.json: {}", file_,
                                   fmt::format(format, std::forward<Args>(args)...));
  }

  // Adds to the text whose hash is the fingerprint; the length keeps neighbours apart.
  void describe(std::string_view what, std::string_view value) {
    description_ += fmt::format("{} {}:", what, value.size());
    description_ += value;
  }

  // true where `key` is missing, null, false, or empty.
  static bool is_off(const json& object, const char* key) {
    const auto value = object.find(key);
    return value == object.end() || value->is_null() || *value == false || *value == "" || *value == 0.0;
  }

  void refuse_unsupported(const json& root) const {
    if (!root.is_object() || !root.contains("model") || !root.at("model").is_object()) damaged("it has no \"model\"");
    for (const char* key : {"normalizer", "truncation", "padding"}) {
      if (is_off(root, key)) continue;
      const json& value = root.at(key);
      const bool typed = value.is_object() && value.contains("type") && value.at("type").is_string();
      refuse(fmt::format("a {}{}", key, typed ? " (" + value.at("type").get<std::string>() + ")" : ""));
    }
    if (is_off(root, "pre_tokenizer")) refuse("no pre_tokenizer");
    if (!is_off(root, "decoder") && root.at("decoder").at("type") != "ByteLevel") {
      refuse(fmt::format("the decoder {}", root.at("decoder").at("type").get<std::string>()));
    }
    const json& model = root.at("model");
    const std::string type = model.value("type", model.contains("merges") ? "BPE" : "without a type");
    if (type != "BPE") refuse(fmt::format("a model of type {}", type));
    for (const char* key :
         {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"}) {
      if (!is_off(model, key)) refuse(fmt::format("{} in its model", key));
    }
    // unk_token is harmless: every byte is a token, so no character is unknown.
  }

  std::optional<std::string> bytes_of(std::string_view token) const {
    std::string bytes;
    for (std::size_t at = 0; at < token.size();) {
      const std::size_t length = static_cast<unsigned char>(token[at]) < 0x80 ? 1 : 2;
      const auto byte = bytes_of_characters_.find(std::string(token.substr(at, length)));
      if (byte == bytes_of_characters_.end()) return std::nullopt;
      bytes += static_cast<char>(byte->second);
      at += length;
    }
    return bytes;
  }

  std::int32_t id_of(const json& value, std::string_view token) const {
    // What is no number at all is refused by get(), and a real number may be beyond any integer.
    const std::int64_t id = value.is_number_float() ? -1 : value.get<std::int64_t>();
    if (!value.is_number_integer() || id < 0 || id >= std::numeric_limits<std::int32_t>::max()) {
      damaged("token \"{}\" has the id {}", token, value.dump());
    }
    return static_cast<std::int32_t>(id);
  }

  void add_token(std::int32_t id, std::string bytes) {
    if (!definition_.bytes_of_id.emplace(id, std::move(bytes)).second) damaged("two tokens have the id {}", id);
    definition_.vocab_size = std::max<std::int64_t>(definition_.vocab_size, std::int64_t{id} + 1);
  }

  void read_vocabulary(const json& model) {
    const bool ignore_merges = !is_off(model, "ignore_merges");
    describe("ignore_merges", ignore_merges ? "yes" : "no");
    std::array<bool, 256> have{};
    for (const auto& [token, value] : model.at("vocab").items()) {
      const std::int32_t id = id_of(value, token);
      vocabulary_.emplace(token, id);
      // A token with other characters can't be reached by merging bytes; it stands for its own UTF-8 bytes.
      const std::optional<std::string> bytes = bytes_of(token);
      add_token(id, bytes.value_or(token));
      if (!bytes) continue;
      if (bytes->size() == 1) {
        const auto byte = static_cast<unsigned char>(bytes->front());
        definition_.bpe.byte_ids[byte] = id;
        have[byte] = true;
      }
      if (ignore_merges) definition_.bpe.whole.emplace(*bytes, id);
    }
    const auto missing = std::find(have.begin(), have.end(), false);
    if (missing != have.end()) refuse(fmt::format("no token for the byte {}", missing - have.begin()));
  }

  std::int32_t known(const std::string& token, std::size_t merge) const {
    const auto found = vocabulary_.find(token);
    if (found == vocabulary_.end()) damaged("merge {} needs the token \"{}\", which is not in vocab", merge, token);
    return found->second;
  }

  void read_merges(const json& model) {
    const json& merges = model.at("merges");
    for (std::size_t i = 0; i < merges.size(); ++i) {
      std::string left, right;
      if (merges[i].is_string()) {
        const auto pair = merges[i].get<std::string>();
        if (pair.starts_with("#version")) continue;  // a line of merges.txt that old converters took along
        const std::size_t space = pair.find(' ');
        if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos) {
          damaged("merge {} is \"{}\", not two tokens", i, pair);
        }
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      } else {
        if (!merges[i].is_array() || merges[i].size() != 2) damaged("merge {} is not two tokens", i);
        left = merges[i][0].get<std::string>();
        right = merges[i][1].get<std::string>();
      }
      definition_.bpe.merges.push_back({known(left, i), known(right, i), known(left + right, i)});
      describe("merge", fmt::format("{} {}", known(left, i), known(right, i)));
    }
  }

  void add_stages(const json& node, bool& byte_level) {
    const auto type = node.at("type").get<std::string>();
    if (byte_level) refuse(fmt::format("the pre_tokenizer {} after ByteLevel", type));
    PreTokenizer& stages = definition_.pre_tokenizer;
    if (type == "Sequence") {
      for (const json& part : node.at("pretokenizers")) add_stages(part, byte_level);
    } else if (type == "ByteLevel") {
      byte_level = true;
      if (node.at("add_prefix_space").get<bool>()) stages.add_prefix_space();
      if (node.value("use_regex", true)) stages.add_split({pcre2_of_oniguruma(kByteLevelPattern, file_), file_});
    } else if (type == "Digits") {
      const std::string number =
          fmt::format("(?:{}|[{}])", pcre2_of_oniguruma("\\p{N}", file_), kNumberAdditionsOfRust);
      stages.add_split({node.at("individual_digits").get<bool>() ? number : number + "+", file_});
    } else if (type == "Split") {
      add_split_stage(node);
    } else {
      refuse(fmt::format("the pre_tokenizer {}", type));
    }
  }

  void add_split_stage(const json& node) {
    const auto behavior = node.at("behavior").get<std::string>();
    if (behavior != "Isolated") refuse(fmt::format("a pre_tokenizer Split with the behavior {}", behavior));
    // `invert` is not read: with Isolated the matches and what is between them are pieces alike.
    const json& pattern = node.at("pattern");
    if (pattern.contains("Regex")) {
      definition_.pre_tokenizer.add_split({pcre2_of_oniguruma(pattern.at("Regex").get<std::string>(), file_), file_});
    } else {
      definition_.pre_tokenizer.add_split({pcre2_of_literal(pattern.at("String").get<std::string>()), file_});
    }
  }

  // The package numbers added tokens itself, so a file whose numbers are others would mean two things.
  void read_added_tokens(const json& tokens) {
    std::int64_t next = static_cast<std::int64_t>(vocabulary_.size());
    for (const json& token : tokens) {
      const auto content = token.at("content").get<std::string>();
      const std::int32_t id = id_of(token.at("id"), content);
      for (const char* key : {"single_word", "lstrip", "rstrip"}) {
        if (!is_off(token, key)) refuse(fmt::format("the added token \"{}\" with {}", content, key));
      }
      if (content.empty()) damaged("the added token {} is empty", id);
      const auto known = vocabulary_.find(content);
      const std::int64_t right = known != vocabulary_.end() ? known->second : next;
      if (id != right) damaged("the added token \"{}\" has the id {}, by its place it has {}", content, id, right);
      next = std::max<std::int64_t>(next, std::int64_t{id} + 1);
      const bool normalized = token.at("normalized").get<bool>();
      (normalized ? definition_.added_second : definition_.added_first).add(content, id);
      if (known == vocabulary_.end()) {
        add_token(id, content);
        vocabulary_.emplace(content, id);
      }
      describe(normalized ? "added, normalized" : "added", content);
    }
  }

  void finish() {
    std::optional<std::int32_t> end_of_text;
    for (const char* name : kEndOfText) {
      const auto found = vocabulary_.find(std::string_view(name));
      if (found != vocabulary_.end() && !end_of_text) end_of_text = found->second;
    }
    if (!end_of_text) {
      base::fail<base::UsageError>("{}: has no end-of-text token: none of {} is in its vocabulary; add one to the file",
                                   file_, fmt::join(kEndOfText, ", "));
    }
    definition_.end_of_text = *end_of_text;
    std::map<std::int32_t, std::string_view> by_id(definition_.bytes_of_id.begin(), definition_.bytes_of_id.end());
    for (const auto& [id, bytes] : by_id) describe(std::to_string(id), bytes);
    definition_.fingerprint = hash_hex(description_);
  }

  const std::string file_;
  const std::map<std::string, unsigned char> bytes_of_characters_ = bytes_of_characters();
  StringMap<std::int32_t> vocabulary_;  // as the file writes the tokens
  TokenizerDefinition definition_;
  std::string description_;
};

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer_json(const std::filesystem::path& path) {
  const base::MappedFile file(path);
  const auto* const begin = reinterpret_cast<const char*>(file.bytes().data());
  const auto check_depth = [&](int depth, json::parse_event_t, const json&) {
    if (depth > kMostNested) {
      base::fail<base::DamagedError>("{}: is not a sound tokenizer.json: it is nested more than {} deep", path.string(),
                                     kMostNested);
    }
    return true;
  };
  try {
    const json root = json::parse(begin, begin + file.bytes().size(), check_depth);
    return std::make_unique<BpeTokenizer>(Reader(path).read(root));
  } catch (const json::exception& e) {
    base::fail<base::DamagedError>("{}: is not a sound tokenizer.json: {}; copy or download it again", path.string(),
                                   e.what());
  }
}

}  // namespace fedshard::data
