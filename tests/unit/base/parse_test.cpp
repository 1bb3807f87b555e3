#include "fedshard/base/parse.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace fedshard::base {
namespace {

TEST(Parse, TheWholeTextIsTheNumber) {
  EXPECT_EQ(parse_number<int>("0"), 0);
  EXPECT_EQ(parse_number<int>("-3"), -3);
  EXPECT_EQ(parse_number<std::int64_t>("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(parse_number<double>("1.5e6"), 1.5e6);
  for (const char* text : {"", " ", " 1", "1 ", "+1", "1x", "0x1", "1.0", "2147483648", "-"}) {
    EXPECT_EQ(parse_number<int>(text), std::nullopt) << text;
  }
  EXPECT_EQ(parse_number<double>("1e999"), std::nullopt);
}

}  // namespace
}  // namespace fedshard::base
