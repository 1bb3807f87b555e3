// Token files: the ids of a text, memory-mapped, so that a data set of any size costs no memory and no start-up time.
// Surprising: opening reads the header only. The checksum over the ids takes a read of the whole file, so it is checked
// when asked for: verify().
//
// Format, little-endian: a header of 4096 bytes, then token_count ids of 32 bits. Header, by byte: 0 magic "FEDSHTOK",
// 8 byte order mark 0x01020304, 12 version, 16 token count, 24 document count, 32 records skipped while preparing,
// 40 vocab size, 48 end-of-text id, 56 largest id (-1: no tokens), 64 tokenizer fingerprint (16 characters), 80
// xxhash64 of the ids, 88 xxhash64 of the bytes before; zeros to the end. All numbers are 64-bit but for the mark and
// the version.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "fedshard/base/file.h"
#include "fedshard/data/tokenizer.h"

namespace fedshard::data {

inline constexpr std::uint32_t kTokenFileVersion = 1;

struct TokenFileInfo {
  std::int64_t tokens = 0;
  std::int64_t documents = 0;
  std::int64_t skipped = 0;      // bad records left out by the policy `skip`
  std::int64_t vocab_size = 0;   // of the tokenizer
  std::int64_t end_of_text = 0;  // id
  std::int64_t max_id = -1;
  std::string fingerprint;  // of the tokenizer
  std::uint64_t payload_hash = 0;
};

// true for a file that begins with the magic, whole or not. Throws UsageError where it can't be opened.
bool looks_like_token_file(const std::filesystem::path& path);

// A token file mapped read-only. Movable.
class TokenFile {
 public:
  // Throws UsageError where the file can't be opened or is none of ours, DamagedError where the header or the size is
  // wrong; either names the file and what to do.
  explicit TokenFile(const std::filesystem::path& path);

  const TokenFileInfo& info() const { return info_; }
  const std::filesystem::path& path() const { return file_.path(); }

  // All ids; valid while the object lives.
  std::span<const std::int32_t> tokens() const;

  // Reads the whole file. Throws DamagedError where the ids do not have the checksum of the header.
  void verify() const;

 private:
  base::MappedFile file_;
  TokenFileInfo info_;
};

// Writes a token file: everything goes to a temporary file beside `path`, which finish() renames to it. Destroyed
// without finish(), it leaves nothing behind. Any number of writers of one path may run at once; the last one wins.
class TokenFileWriter {
 public:
  // Throws RunError where the temporary file can't be created.
  TokenFileWriter(const std::filesystem::path& path, const Tokenizer& tokenizer);
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  // Appends a document's ids and the end-of-text id. Throws RunError where it can't be written.
  void add_document(std::span<const std::int32_t> ids);

  // Makes the file visible under its name, flushed to disk. Returns its header's numbers. Throws RunError.
  TokenFileInfo finish(std::int64_t skipped);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fedshard::data
