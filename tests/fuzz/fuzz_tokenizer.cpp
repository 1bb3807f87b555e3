// tokenizer.json: the input's first line is the file, the rest a text to encode with it.
// Every byte must be a token, which no mutation would keep up, so the first '@' of the file stands for all of them.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fedshard/base/error.h"
#include "fedshard/data/tokenizer.h"
#include "tests/fuzz/memory_file.h"

namespace {

// A pattern may need time exponential in the text, as in any library of this kind; with so few bytes that is a second.
constexpr std::size_t kLongestText = 20;

// `"a":97,"b":98,...` with the characters by which such files write bytes.
std::string byte_tokens() {
  std::string tokens;
  unsigned next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool prints = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    const unsigned c = prints ? byte : next++;
    const std::string utf8 = c < 0x80
                                 ? std::string{static_cast<char>(c)}
                                 : std::string{static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
    tokens += (byte == 0 ? "" : ",") + nlohmann::json(utf8).dump() + ":" + std::to_string(byte);
  }
  return tokens;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  static const std::string kBytes = byte_tokens();
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t newline = std::min(input.find('\n'), size);
  std::string file(input.substr(0, newline));
  if (const std::size_t place = file.find('@'); place != std::string::npos) file.replace(place, 1, kBytes);
  const std::string text(newline < size ? input.substr(newline + 1, kLongestText) : "");

  const fedshard::fuzz::MemoryFile memory(file);
  try {
    const auto tokenizer = fedshard::data::load_tokenizer(memory.path().string());
    const std::vector<std::int32_t> ids = tokenizer->encode(text);
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
    }
    tokenizer->decode(ids);
  } catch (const fedshard::base::Error&) {
  }
  return 0;
}
