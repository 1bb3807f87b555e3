#include "fedshard/control/host_list.h"

#include <cstddef>
#include <utility>

#include "fedshard/base/error.h"
#include "fedshard/base/parse.h"

namespace fedshard::control {
namespace {

constexpr std::size_t kMaxHosts = 1'000'000;

[[noreturn]] void refuse(std::string_view list, std::string_view why) {
  base::fail<base::UsageError>("node list '{}': {}", list, why);
}

long number(std::string_view list, std::string_view text) {
  const auto value = base::parse_number<long>(text);
  if (!value || text.front() == '-') refuse(list, fmt::format("'{}' is not a number", text));
  return *value;
}

// The parts of `text` between commas that stand outside brackets.
std::vector<std::string_view> split(std::string_view list, std::string_view text) {
  std::vector<std::string_view> parts;
  std::size_t start = 0;
  int depth = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';
    if (c == '[' && ++depth > 1) refuse(list, "a bracket inside a bracket");
    if (c == ']' && --depth < 0) refuse(list, "']' without '['");
    if (i == text.size() && depth != 0) refuse(list, "'[' without ']'");
    if (c != ',' || depth != 0) continue;
    if (i == start) refuse(list, "an empty part");
    parts.push_back(text.substr(start, i - start));
    start = i + 1;
  }
  return parts;
}

// What stands between '[' and ']': "01-03,7" -> 01 02 03 7.
std::vector<std::string> numbers_of(std::string_view list, std::string_view inside) {
  std::vector<std::string> numbers;
  for (const std::string_view part : split(list, inside)) {
    const std::size_t dash = part.find('-');
    const std::string_view first = part.substr(0, dash);
    const long low = number(list, first);
    const long high = dash == std::string_view::npos ? low : number(list, part.substr(dash + 1));
    if (high < low) refuse(list, fmt::format("the range '{}' runs backwards", part));
    if (static_cast<std::size_t>(high - low) >= kMaxHosts) refuse(list, "too many hosts");
    for (long n = low; n <= high; ++n) numbers.push_back(fmt::format("{:0{}}", n, first.size()));
  }
  return numbers;
}

std::vector<std::string> expand_one(std::string_view list, std::string_view text) {
  std::vector<std::string> names{""};
  while (!text.empty()) {
    const std::size_t open = text.find('[');
    for (std::string& name : names) name += text.substr(0, open);
    if (open == std::string_view::npos) break;
    const std::size_t close = text.find(']', open);
    const auto numbers = numbers_of(list, text.substr(open + 1, close - open - 1));
    if (names.size() * numbers.size() > kMaxHosts) refuse(list, "too many hosts");
    std::vector<std::string> longer;
    longer.reserve(names.size() * numbers.size());
    for (const std::string& name : names) {
      for (const std::string& n : numbers) longer.push_back(name + n);
    }
    names = std::move(longer);
    text.remove_prefix(close + 1);
  }
  return names;
}

}  // namespace

std::vector<std::string> expand_hosts(std::string_view list) {
  std::vector<std::string> hosts;
  if (list.empty()) return hosts;
  for (const std::string_view part : split(list, list)) {
    for (std::string& host : expand_one(list, part)) hosts.push_back(std::move(host));
    if (hosts.size() > kMaxHosts) refuse(list, "too many hosts");
  }
  return hosts;
}

}  // namespace fedshard::control
