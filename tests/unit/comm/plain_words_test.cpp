#include "fedshard/comm/plain_words.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace fedshard::comm {
namespace {

std::string plain(const std::string& text) { return plain_words(std::runtime_error(text)); }

TEST(PlainWords, LeaveOutWhatHelpsNobody) {
  EXPECT_EQ(
      plain("[/src/gloo/pair.cc:12] Read error [127.0.0.1]:80: reset. This is typically caused by a worker. GLHF!"),
      "Read error [127.0.0.1]:80: reset");
  EXPECT_EQ(plain("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address"),
            "ifa != nullptr. Unable to find address");
  EXPECT_EQ(plain("wait timeout after 300ms\nException raised from doWait\nframe #0"), "wait timeout after 300ms");
}

TEST(PlainWords, KeepWhatIsPlainAlready) {
  for (const char* text : {"", "disk full", "[127.0.0.1]:80 said no", "[a.cc:1]"}) EXPECT_EQ(plain(text), text);
}

}  // namespace
}  // namespace fedshard::comm
