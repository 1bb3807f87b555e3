// Token files. An input that begins with 's' is sealed: it gets the magic, the version and the header's right checksum,
// without which nothing behind the checksum would ever be reached. Any other is the file as it is.
#include <xxhash.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "fedshard/base/error.h"
#include "fedshard/data/token_file.h"
#include "tests/fuzz/memory_file.h"

namespace {

constexpr std::size_t kHeaderBytes = 4096, kHashAt = 88, kNumbersAt = 16;  // token_file.h has the format

std::string sealed(std::string_view input) {
  std::string header("FEDSHTOK\x04\x03\x02\x01\x01\x00\x00\x00", kNumbersAt);
  header += input.substr(0, kHashAt - kNumbersAt);
  header.resize(kHeaderBytes);
  const std::uint64_t hash = XXH64(header.data(), kHashAt, 0);
  std::memcpy(header.data() + kHashAt, &hash, sizeof(hash));
  if (input.size() > kHashAt - kNumbersAt) header += input.substr(kHashAt - kNumbersAt);
  return header;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const fedshard::fuzz::MemoryFile memory(input.starts_with('s') ? sealed(input.substr(1)) : input);
  fedshard::data::looks_like_token_file(memory.path());
  try {
    const fedshard::data::TokenFile file(memory.path());
    if (static_cast<std::int64_t>(file.tokens().size()) != file.info().tokens || file.info().tokens < 0) std::abort();
    file.verify();
  } catch (const fedshard::base::Error&) {
  }
  return 0;
}
