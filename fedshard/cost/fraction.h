// A whole number divided by another, exactly: what a step has of a round's bytes.
#pragma once
#include <cstdint>
#include <string>

namespace fedshard::cost {

// In lowest terms; the denominator is positive.
class Fraction {
 public:
  Fraction(std::int64_t numerator, std::int64_t denominator = 1);  // the latter not 0
  std::int64_t numerator() const { return numerator_; }
  std::int64_t denominator() const { return denominator_; }
  double value() const { return static_cast<double>(numerator_) / static_cast<double>(denominator_); }
  std::string text() const;  // "4/25", "5760"
  bool operator==(const Fraction&) const = default;

 private:
  std::int64_t numerator_, denominator_;
};

// Throws RunError where the result does not fit 64 bits.
Fraction operator+(const Fraction& a, const Fraction& b);
Fraction operator/(const Fraction& a, const Fraction& b);  // b not 0

}  // namespace fedshard::cost
