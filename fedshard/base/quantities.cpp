#include "fedshard/base/quantities.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace fedshard::base {
namespace {

// Three significant digits of a number below 1024, without an exponent.
std::string three_digits(double value) {
  const double size = std::abs(value);
  return fmt::format("{:.{}f}", value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

}  // namespace

std::string human(Bytes bytes) {
  constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes.count);
  std::size_t unit = 0;
  // 1023.5 and more would print as 1024.
  while (std::abs(value) >= (unit == 0 ? 1024 : 1023.5) && unit + 1 < units.size()) value /= 1024, ++unit;
  return unit == 0 ? fmt::format("{} B", bytes.count) : fmt::format("{} {}", three_digits(value), units[unit]);
}

std::string human_count(double count) {
  constexpr std::array units = {"", "k", "M", "G", "T", "P"};
  if (!std::isfinite(count)) return fmt::format("{}", count);
  std::size_t unit = 0;
  while (std::abs(count) >= 999.5 && unit + 1 < units.size()) count /= 1000, ++unit;
  const bool whole = unit == 0 && std::trunc(count) == count;
  return (whole ? fmt::format("{:.0f}", count) : three_digits(count)) + units[unit];
}

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || std::abs(seconds) > 1e15) return "?";
  if (std::abs(seconds) < 59.95) return three_digits(seconds) + "s";
  const auto whole = static_cast<std::int64_t>(std::round(std::abs(seconds)));
  const char* sign = seconds < 0 ? "-" : "";
  if (whole < 3600) return fmt::format("{}{}m{:02}s", sign, whole / 60, whole % 60);
  if (whole < 86400) return fmt::format("{}{}h{:02}m", sign, whole / 3600, whole % 3600 / 60);
  return fmt::format("{}{}d{:02}h", sign, whole / 86400, whole % 86400 / 3600);
}

}  // namespace fedshard::base
