#include "fedshard/base/quantities.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace fedshard::base {
namespace {

TEST(Quantities, BytesInBinaryUnits) {
  EXPECT_EQ(human(Bytes{0}), "0 B");
  EXPECT_EQ(human(Bytes{1023}), "1023 B");
  EXPECT_EQ(human(Bytes{1024}), "1.00 KiB");
  EXPECT_EQ(human(Bytes{1024 * 1024 - 1}), "1.00 MiB");  // never "1024 KiB"
  EXPECT_EQ(human(Bytes{43201003}), "41.2 MiB");
  EXPECT_EQ(human(Bytes{std::int64_t{3} << 29}), "1.50 GiB");
  EXPECT_EQ(human(Bytes{std::numeric_limits<std::int64_t>::max()}), "8.00 EiB");
  EXPECT_EQ(human(Bytes{-2048}), "-2.00 KiB");
  EXPECT_EQ(Bytes{3} + Bytes{4}, Bytes{7});
  EXPECT_LT(Bytes{3}, Bytes{4});
}

TEST(Quantities, CountsInDecimalUnits) {
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(999.7), "1.00k");
  EXPECT_EQ(human_count(0.5), "0.50");
  EXPECT_EQ(human_count(12345), "12.3k");
  EXPECT_EQ(human_count(9996), "10.0k");
  EXPECT_EQ(human_count(8030261248), "8.03G");
  EXPECT_EQ(human_count(1e18), "1000P");
  EXPECT_EQ(human_count(std::nan("")), "nan");
}

TEST(Quantities, SecondsInTheirTwoLargestUnits) {
  EXPECT_EQ(human_seconds(0), "0.00s");
  EXPECT_EQ(human_seconds(0.4249), "0.42s");
  EXPECT_EQ(human_seconds(59.94), "59.9s");
  EXPECT_EQ(human_seconds(59.96), "1m00s");
  EXPECT_EQ(human_seconds(192), "3m12s");
  EXPECT_EQ(human_seconds(3599.6), "1h00m");
  EXPECT_EQ(human_seconds(7500), "2h05m");
  EXPECT_EQ(human_seconds(86400 * 3 + 4 * 3600), "3d04h");
  EXPECT_EQ(human_seconds(-90), "-1m30s");
  EXPECT_EQ(human_seconds(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(human_seconds(1e300), "?");
}

}  // namespace
}  // namespace fedshard::base
