// Numbers from text.
#pragma once
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace fedshard::base {

// The number that the whole text is ("-3", "1e6" for a float), without blanks or a plus sign. Nothing where it is none,
// or does not fit the type.
template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc{} || parsed.ptr != end) return std::nullopt;
  return number;
}

}  // namespace fedshard::base
