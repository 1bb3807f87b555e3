#include "fedshard/cost/fraction.h"

#include <fmt/format.h>

#include <limits>
#include <numeric>

#include "fedshard/base/error.h"

namespace fedshard::cost {
namespace {

__extension__ using Wide = __int128;

Wide gcd(Wide a, Wide b) { return b == 0 ? (a < 0 ? -a : a) : gcd(b, a % b); }

Fraction reduced(Wide numerator, Wide denominator) {
  const Wide divisor = gcd(numerator, denominator);
  numerator /= divisor;
  denominator /= divisor;
  constexpr Wide most = std::numeric_limits<std::int64_t>::max();
  base::require(numerator <= most && -numerator <= most && denominator <= most && -denominator <= most,
                "a fraction of bytes does not fit 64 bits");
  return {static_cast<std::int64_t>(numerator), static_cast<std::int64_t>(denominator)};
}

}  // namespace

Fraction::Fraction(std::int64_t numerator, std::int64_t denominator) {
  base::require(denominator != 0, "a fraction divides by 0");
  const std::int64_t divisor = std::gcd(numerator, denominator) * (denominator < 0 ? -1 : 1);
  numerator_ = numerator / divisor;
  denominator_ = denominator / divisor;
}

std::string Fraction::text() const {
  return denominator_ == 1 ? fmt::format("{}", numerator_) : fmt::format("{}/{}", numerator_, denominator_);
}

Fraction operator+(const Fraction& a, const Fraction& b) {
  return reduced(Wide{a.numerator()} * b.denominator() + Wide{b.numerator()} * a.denominator(),
                 Wide{a.denominator()} * b.denominator());
}

Fraction operator/(const Fraction& a, const Fraction& b) {
  base::require(b.numerator() != 0, "a fraction divides by 0");
  return reduced(Wide{a.numerator()} * b.denominator(), Wide{a.denominator()} * b.numerator());
}

}  // namespace fedshard::cost
