// `fedshard data prepare | inspect | encode`.
// Surprising: results go to standard output and the running progress, only where it is a terminal, to standard error,
// so the output can be piped.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace fedshard::cli {

// All return 0 and throw base::Error for everything that goes wrong.

struct DataPrepareArgs {
  std::vector<std::string> inputs;   // paths or globs of .txt and .jsonl files; their documents in this order
  std::filesystem::path output;      // the token file
  std::string tokenizer = "byte";    // "byte" or a tokenizer.json
  std::string bad_records = "fail";  // or "skip"
};
// Prints one line: documents, tokens, skipped records.
int data_prepare(const DataPrepareArgs& args);

struct DataInspectArgs {
  std::vector<std::filesystem::path> files;             // token files
  std::optional<std::string> tokenizer = std::nullopt;  // given: the beginning of each file is decoded and printed
  std::int64_t head = 64;                               // tokens of it
  std::int64_t order = 0;  // > 0: the ledger of the files' first `order` sequences, see below
  std::uint64_t seed = 0;  // of the ledger: [training] seed and seq_len
  std::int64_t seq_len = 0;
};
// Prints each file's header and checks its checksum. The ledger is a line `position epoch sequence` for each sequence
// in the order of consumption, as training on these files with this seed and seq_len consumes them, whatever the
// layout.
int data_inspect(const DataInspectArgs& args);

struct DataEncodeArgs {
  std::string tokenizer = "byte";
  std::filesystem::path input = "-";  // "-": standard input
  bool jsonl = false;                 // documents are JSON lines; else the whole input is one document
};
// Prints each document's ids on a line of its own, without special tokens (see data/tokenizer.h).
int data_encode(const DataEncodeArgs& args);

}  // namespace fedshard::cli
