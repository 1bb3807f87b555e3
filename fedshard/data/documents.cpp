#include "fedshard/data/documents.h"

#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::data {
namespace {

constexpr std::size_t kBlockBytes = 1 << 20;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr std::string_view kBlanks = " \t\r";

// Reads up to `size` bytes; 0 at the end.
std::size_t read_block(std::istream& input, const std::string& name, char* out, std::size_t size) {
  input.read(out, static_cast<std::streamsize>(size));
  if (input.bad()) base::fail<base::RunError>("{}: cannot read: {}", name, std::strerror(errno));
  return static_cast<std::size_t>(input.gcount());
}

class PlainReader final : public DocumentReader {
 public:
  PlainReader(std::istream& input, std::string name) : input_(input), name_(std::move(name)) {}

  bool next(std::string& text) override {
    if (done_) return false;
    done_ = true;
    text.clear();
    for (std::size_t n = kBlockBytes; n == kBlockBytes;) {
      const std::size_t size = text.size();
      text.resize(size + kBlockBytes);
      n = read_block(input_, name_, text.data() + size, kBlockBytes);
      text.resize(size + n);
    }
    bytes_read_ = static_cast<std::int64_t>(text.size());
    return true;
  }
  std::int64_t skipped() const override { return 0; }
  std::int64_t bytes_read() const override { return bytes_read_; }

 private:
  std::istream& input_;
  std::string name_;
  std::int64_t bytes_read_ = 0;
  bool done_ = false;
};

class JsonlReader final : public DocumentReader {
 public:
  JsonlReader(std::istream& input, std::string name, BadRecords policy)
      : input_(input), name_(std::move(name)), policy_(policy) {}

  bool next(std::string& text) override {
    std::string_view line;
    while (next_line(line)) {
      if (number_ == 1 && line.starts_with(kByteOrderMark)) line.remove_prefix(kByteOrderMark.size());
      if (line.find_first_not_of(kBlanks) == std::string_view::npos) continue;
      const std::string problem = parse(line, text);
      if (problem.empty()) return true;
      if (policy_ == BadRecords::fail) {
        base::fail<base::DamagedError>(
            "{}:{}: {}; repair the line, or leave bad records out with `fedshard data prepare --bad-records skip`",
            name_, number_, problem);
      }
      ++skipped_;
    }
    return false;
  }
  std::int64_t skipped() const override { return skipped_; }
  std::int64_t bytes_read() const override { return bytes_read_; }

 private:
  // The next line without its newline. It is followed by the padding that simdjson reads beyond a text.
  bool next_line(std::string_view& line) {
    std::size_t searched = 0;  // bytes of the line that hold no newline
    for (;;) {
      const char* const start = buffer_.data() + begin_;
      const void* const newline = std::memchr(start + searched, '\n', end_ - begin_ - searched);
      if (newline == nullptr && !ended_) {
        searched = end_ - begin_;
        refill();
        continue;
      }
      if (newline == nullptr && begin_ == end_) return false;
      const std::size_t stop =
          newline == nullptr ? end_ : static_cast<std::size_t>(static_cast<const char*>(newline) - buffer_.data());
      line = {buffer_.data() + begin_, stop - begin_};
      begin_ = std::min(stop + 1, end_);
      ++number_;
      return true;
    }
  }

  void refill() {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    if (buffer_.size() < end_ + kBlockBytes + simdjson::SIMDJSON_PADDING) {
      buffer_.resize(2 * end_ + kBlockBytes + simdjson::SIMDJSON_PADDING);
    }
    const std::size_t room = buffer_.size() - simdjson::SIMDJSON_PADDING - end_;
    const std::size_t n = read_block(input_, name_, buffer_.data() + end_, room);
    end_ += n;
    bytes_read_ += static_cast<std::int64_t>(n);
    ended_ = n < room;
  }

  // What is wrong with the record; empty: nothing, and `text` is its document.
  std::string parse(std::string_view line, std::string& text) {
    simdjson::dom::element record;
    if (const auto error = parser_.parse(line.data(), line.size(), false).get(record)) {
      return fmt::format("is not one JSON value ({})", simdjson::error_message(error));
    }
    if (!record.is_object()) return "is not a JSON object";
    simdjson::dom::element value;
    if (record.at_key("text").get(value) != simdjson::SUCCESS) return "has no field \"text\"";
    std::string_view content;
    if (value.get(content) != simdjson::SUCCESS) return "its \"text\" is not a string";
    text = content;
    return "";
  }

  std::istream& input_;
  std::string name_;
  BadRecords policy_;
  simdjson::dom::parser parser_;
  std::vector<char> buffer_ = std::vector<char>(
      simdjson::SIMDJSON_PADDING);  // [begin_, end_) is read and not handed out, then at least the padding
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  bool ended_ = false;
  std::int64_t number_ = 0;  // of the present line, from 1
  std::int64_t skipped_ = 0;
  std::int64_t bytes_read_ = 0;
};

}  // namespace

BadRecords parse_bad_records(std::string_view text) {
  if (text == "fail") return BadRecords::fail;
  if (text == "skip") return BadRecords::skip;
  base::fail<base::UsageError>("bad_records is \"{}\"; it must be fail or skip", text);
}

TextKind kind_of_text(const std::filesystem::path& path) {
  if (path.extension() == ".txt") return TextKind::plain;
  if (path.extension() == ".jsonl") return TextKind::jsonl;
  base::fail<base::UsageError>("{}: is no token file, and of texts fedshard reads .txt and .jsonl", path.string());
}

std::unique_ptr<DocumentReader> read_documents(std::istream& input, std::string name, TextKind kind,
                                               BadRecords policy) {
  if (kind == TextKind::plain) return std::make_unique<PlainReader>(input, std::move(name));
  return std::make_unique<JsonlReader>(input, std::move(name), policy);
}

}  // namespace fedshard::data
