// Raw text to token files: by command, and on first use by training.
// Surprising: a prepared file is found again by path, size and time of modification of its source, not by its content:
// reading a terabyte to learn that nothing changed would take longer than most runs have patience for.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "fedshard/data/documents.h"
#include "fedshard/data/token_file.h"
#include "fedshard/data/tokenizer.h"

namespace fedshard::data {

struct PrepareProgress {
  std::filesystem::path output;
  std::int64_t bytes = 0;  // of the inputs, read so far
  std::int64_t total_bytes = 0;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};
// Called about once a MiB of input, and at the end of each file.
using PrepareCallback = std::function<void(const PrepareProgress&)>;

// Writes the documents of `inputs` (.txt or .jsonl, in the given order), each followed by end of text, to the token
// file `output`; a text without any characters is a document too. Streams: memory holds one document. `output` appears
// whole or not at all. Throws UsageError where an input is missing, of another kind, or all together hold no document,
// DamagedError for a bad record under BadRecords::fail, RunError where reading or writing fails.
TokenFileInfo prepare_token_file(const std::vector<std::filesystem::path>& inputs, const std::filesystem::path& output,
                                 const Tokenizer& tokenizer, BadRecords policy, const PrepareCallback& progress = {});

// The files that paths and globs name, those of each glob in byte order. Throws UsageError where one matches nothing or
// a folder.
std::vector<std::filesystem::path> expand_globs(const std::vector<std::string>& patterns);

// The token files behind `patterns`, in order, each verified by checksum once (a marker in `cache` remembers). Token
// files are taken as they are, .txt and .jsonl are prepared into the folder `cache`, which is made where needed, unless
// they are there already. Several processes may do this at once: on one machine one prepares and the others wait.
// Throws UsageError where a token file comes from another tokenizer, and the errors of prepare_token_file and
// TokenFile.
std::vector<std::filesystem::path> resolve_data(const std::vector<std::string>& patterns, const Tokenizer& tokenizer,
                                                const std::filesystem::path& cache, BadRecords policy,
                                                const PrepareCallback& progress = {});

}  // namespace fedshard::data
