#include "fedshard/cli/data.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>

#include "fedshard/base/error.h"
#include "fedshard/data/loader.h"
#include "fedshard/data/prepare.h"
#include "fedshard/data/tokenizer.h"

namespace fedshard::cli {
namespace {

void show_progress(const data::PrepareProgress& done) {
  fmt::print(stderr, "\r{}: {:3d} %, {} documents, {} tokens", done.output.filename().string(),
             done.total_bytes > 0 ? 100 * done.bytes / done.total_bytes : 100, done.documents, done.tokens);
}

// Control characters and bytes that are no UTF-8 would play with the terminal.
std::string printable(const std::string& text) { return fmt::format("{:?}", std::string_view(text)); }

void print_file(const data::TokenFile& file, const data::Tokenizer* tokenizer, std::int64_t head) {
  const data::TokenFileInfo& info = file.info();
  file.verify();
  fmt::print("{}: {} tokens, {} documents, {} records skipped, ids up to {}\n", file.path().string(), info.tokens,
             info.documents, info.skipped, info.max_id);
  fmt::print("  tokenizer {}: vocab_size {}, end of text {}\n", info.fingerprint, info.vocab_size, info.end_of_text);
  fmt::print("  format version {}, checksum {:016x}: right\n", data::kTokenFileVersion, info.payload_hash);
  if (tokenizer == nullptr) return;
  if (tokenizer->fingerprint() != info.fingerprint) {
    base::fail<base::UsageError>("{}: was prepared with tokenizer {}, the given one is {}", file.path().string(),
                                 info.fingerprint, tokenizer->fingerprint());
  }
  const auto tokens = file.tokens();
  const auto n = std::min(tokens.size(), static_cast<std::size_t>(std::max<std::int64_t>(head, 0)));
  fmt::print("  text: {}\n", printable(tokenizer->decode(tokens.first(n))));
}

}  // namespace

int data_prepare(const DataPrepareArgs& args) {
  const data::BadRecords policy = data::parse_bad_records(args.bad_records);
  const auto tokenizer = data::load_tokenizer(args.tokenizer);
  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  const auto info = data::prepare_token_file(data::expand_globs(args.inputs), args.output, *tokenizer, policy,
                                             terminal ? show_progress : data::PrepareCallback{});
  if (terminal) fmt::print(stderr, "\n");
  fmt::print("{}: {} documents, {} tokens, {} records skipped\n", args.output.string(), info.documents, info.tokens,
             info.skipped);
  return 0;
}

int data_inspect(const DataInspectArgs& args) {
  if (args.order < 0 || args.head < 0) {
    base::fail<base::UsageError>("--order and --head count from 0, not {}", std::min(args.order, args.head));
  }
  if (args.order > 0 && args.seq_len == 0) base::fail<base::UsageError>("--order needs --seq-len, as in [training]");
  const auto tokenizer = args.tokenizer ? data::load_tokenizer(*args.tokenizer) : nullptr;
  for (const auto& path : args.files) print_file(data::TokenFile(path), tokenizer.get(), args.head);
  if (args.order == 0) return 0;
  const data::TokenDataset dataset(args.files, args.seq_len);
  for (std::int64_t position = 0; position < args.order; ++position) {
    fmt::print("{} {} {}\n", position, position / dataset.size(),
               data::sequence_at(dataset.size(), args.seed, position));
  }
  return 0;
}

int data_encode(const DataEncodeArgs& args) {
  const auto tokenizer = data::load_tokenizer(args.tokenizer);
  std::ifstream file;
  if (args.input != "-") {
    file.open(args.input, std::ios::binary);
    if (!file) base::fail<base::UsageError>("{}: cannot open: {}", args.input.string(), std::strerror(errno));
  }
  const auto kind = args.jsonl ? data::TextKind::jsonl : data::TextKind::plain;
  const auto reader =
      data::read_documents(file.is_open() ? static_cast<std::istream&>(file) : std::cin,
                           args.input == "-" ? "standard input" : args.input.string(), kind, data::BadRecords::fail);
  for (std::string text; reader->next(text);) fmt::print("{}\n", fmt::join(tokenizer->encode(text), " "));
  return 0;
}

}  // namespace fedshard::cli
