// Documents of a .jsonl file under both policies: skipping meets every bad record, and the good ones up to the first
// bad one are the same either way.
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/data/documents.h"

using namespace fedshard::data;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string content(reinterpret_cast<const char*>(data), size);
  std::istringstream skipping_input(content), failing_input(content);
  const auto skipping = read_documents(skipping_input, "x.jsonl", TextKind::jsonl, BadRecords::skip);
  const auto failing = read_documents(failing_input, "x.jsonl", TextKind::jsonl, BadRecords::fail);
  std::string text, other;
  bool bad = false;
  while (skipping->next(text)) {
    if (bad) continue;
    try {
      if (!failing->next(other) || other != text) std::abort();
    } catch (const fedshard::base::Error&) {
      bad = true;
    }
    if (bad && skipping->skipped() == 0) std::abort();
  }
  if (skipping->bytes_read() != static_cast<std::int64_t>(size)) std::abort();
  return 0;
}
