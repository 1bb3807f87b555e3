// Control messages: decode() never throws, gives a reason for what it refuses, and what it reads can be sent again.
#include <cstdlib>
#include <string>

#include "fedshard/base/error.h"
#include "fedshard/control/messages.h"

using fedshard::control::decode;

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view frame(reinterpret_cast<const char*>(data), size);
  std::string why;
  const auto message = decode(frame, why);
  if (!message) {
    if (why.empty()) std::abort();
    return 0;
  }
  const std::string sent = encode(*message);
  const auto again = decode(sent, why);
  if (!again || again->index() != message->index() || encode(*again) != sent) std::abort();
  return 0;
}
