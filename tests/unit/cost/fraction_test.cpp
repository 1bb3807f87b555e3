#include "fedshard/cost/fraction.h"

#include <gtest/gtest.h>

#include "fedshard/base/error.h"

namespace fedshard::cost {
namespace {

TEST(Fraction, IsExactAndInLowestTerms) {
  EXPECT_EQ(Fraction(12, -8).text(), "-3/2");
  EXPECT_EQ(Fraction(0, 7).text(), "0");
  EXPECT_EQ((Fraction(1, 3) + Fraction(1, 6)).text(), "1/2");
  EXPECT_EQ((Fraction(5760) / Fraction(36000)).text(), "4/25");
  // Numerators whose product does not fit 64 bits.
  const std::int64_t large = 3'000'000'000'000'000'000;
  EXPECT_EQ(Fraction(large, 7) / Fraction(large, 14), Fraction(2));
  EXPECT_THROW(Fraction(large) + Fraction(large * 3), base::RunError);
  EXPECT_THROW(Fraction(1, 0), base::RunError);
}

}  // namespace
}  // namespace fedshard::cost
