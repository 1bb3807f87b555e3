// Quantities as people read them: "1.5 GiB", "12.3k", "3m12s". For logs, tables and progress; files hold plain numbers.
// A surprise: bytes are told in binary units (1 KiB = 1024 bytes), counts in decimal ones (1k = 1000).
#pragma once
#include <compare>
#include <cstdint>
#include <string>

namespace fedshard::base {

struct Bytes {
  std::int64_t count = 0;
  auto operator<=>(const Bytes&) const = default;
  Bytes& operator+=(Bytes other) { return count += other.count, *this; }
  friend Bytes operator+(Bytes a, Bytes b) { return a += b; }
};

// Three significant digits and a unit: "0 B", "1023 B", "1.00 KiB", "41.2 MiB", "1.50 GiB".
std::string human(Bytes bytes);

// Three significant digits: "999", "12.3k", "8.03G". Not finite: "nan", "inf".
std::string human_count(double count);

// The two largest units that are not zero: "0.42s", "59.9s", "3m12s", "2h05m", "3d04h". Not finite: "?".
std::string human_seconds(double seconds);

}  // namespace fedshard::base
