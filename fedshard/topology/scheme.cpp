#include "fedshard/topology/scheme.h"

#include <fmt/format.h>

#include <charconv>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::topology {
namespace {

using base::fail;
using base::UsageError;

constexpr std::int64_t kElementBytes = 4;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 40;
constexpr std::pair<const char*, int> kUnits[] = {{"GiB", 30}, {"MiB", 20}, {"KiB", 10}, {"B", 0}};  // name, shift

}  // namespace

const char* name_of(Scheme scheme) {
  switch (scheme) {
    case Scheme::split:
      return "split";
    case Scheme::leader:
      return "leader";
    case Scheme::naive:
      return "naive";
  }
  return "";
}

Buckets buckets_of(const std::string& text) {
  if (text == "whole") return {};
  if (text == "unit") return {Buckets::By::unit, 0};
  std::int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  for (const auto& [name, shift] : kUnits) {
    if (parsed.ec != std::errc{} || std::string_view(parsed.ptr, end) != name) continue;
    const bool fits = number >= 1 && number <= kMostBytes >> shift;
    if (!fits || (number << shift) % kElementBytes != 0) {
      fail<UsageError>("a bucket has from 4 B to 1024 GiB, a multiple of 4, and not '{}'", text);
    }
    return {Buckets::By::size, (number << shift) / kElementBytes};
  }
  fail<UsageError>("a bucket is \"whole\", \"unit\" or a size such as \"25MiB\" (B, KiB, MiB, GiB), and not '{}'",
                   text);
}

std::string text_of(const Buckets& buckets) {
  if (buckets.by == Buckets::By::whole) return "whole";
  if (buckets.by == Buckets::By::unit) return "unit";
  const std::int64_t bytes = buckets.numel * kElementBytes;
  for (const auto& [name, shift] : kUnits) {
    if (bytes % (std::int64_t{1} << shift) == 0) return fmt::format("{}{}", bytes >> shift, name);
  }
  base::fail<base::RunError>("internal error: a bucket of {} bytes", bytes);
}

void check_scheme(Scheme scheme, const Layout& layout) {
  if (scheme != Scheme::naive) return;
  for (int group = 1; group < layout.groups(); ++group) {
    const int first = layout.group(0).replicas, other = layout.group(group).replicas;
    if (other == first) continue;
    fail<UsageError>(
        "scheme = \"naive\" pairs the replicas of all groups, but group 0 has {} and group {} has {}; take \"split\" "
        "or "
        "\"leader\"",
        first, group, other);
  }
}

}  // namespace fedshard::topology
