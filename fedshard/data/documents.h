// Reads raw text as a stream of documents, one at a time.
// Surprising: a line of a .jsonl file must be one whole JSON object. Several on a line, or a "text" that is null or a
// number, is a bad record, never guessed at.
#pragma once
#include <cstdint>
#include <filesystem>
#include <istream>
#include <memory>
#include <string>
#include <string_view>

namespace fedshard::data {

// What to do with a record that can't be read: end with an error that names file and line, or leave it out and count.
enum class BadRecords { fail, skip };

// "fail" or "skip"; anything else is a UsageError.
BadRecords parse_bad_records(std::string_view text);

enum class TextKind {
  plain,  // .txt: the whole file is one document, byte for byte (a byte order mark and CRLF stay)
  jsonl,  // .jsonl: one object a line, the document is its string "text". A byte order mark, CRLF, blank lines and a
          // missing last newline are fine. Invalid UTF-8 and lone surrogates make a bad record.
};

// By the file's extension; UsageError for any other.
TextKind kind_of_text(const std::filesystem::path& path);

class DocumentReader {
 public:
  virtual ~DocumentReader() = default;
  // Puts the next document into `text`; false at the end. Throws DamagedError for a bad record under `fail`, RunError
  // where reading fails.
  virtual bool next(std::string& text) = 0;
  virtual std::int64_t skipped() const = 0;     // bad records so far
  virtual std::int64_t bytes_read() const = 0;  // of the input, so far
};

// `name` stands for `input` in errors; `input` must outlive the reader. Memory: the longest document.
std::unique_ptr<DocumentReader> read_documents(std::istream& input, std::string name, TextKind kind, BadRecords policy);

}  // namespace fedshard::data
