#include "fedshard/config/values.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fedshard/base/error.h"

namespace fedshard::config {
namespace {

using base::fail;
using base::UsageError;

// "string "abc"": the type and, where it is short enough to help, the value.
std::string found(const toml::node& node) {
  std::ostringstream text;
  std::string type = "a list";
  switch (node.type()) {
    case toml::node_type::string:
      type = "the string", text << '"' << **node.as_string() << '"';
      break;
    case toml::node_type::integer:
      type = "the integer", text << **node.as_integer();
      break;
    case toml::node_type::floating_point:
      type = "the float", text << write_value(**node.as_floating_point());
      break;
    case toml::node_type::boolean:
      type = "the boolean", text << (**node.as_boolean() ? "true" : "false");
      break;
    case toml::node_type::table:
      type = "a table";
      break;
    case toml::node_type::array:
      break;
    default:
      type = "a date or time";
  }
  const std::string value = text.str();
  return value.empty() || value.size() > 60 ? type : type + " " + value;
}

[[noreturn]] void wrong_type(const toml::node& node, const Place& place, std::string_view expected) {
  fail<UsageError>("{}: {} must be {}, not {}", place.source, place.key, expected, found(node));
}

std::string number_text(double value) {
  return std::trunc(value) == value && std::abs(value) < 1e15 ? fmt::format("{:.0f}", value) : fmt::format("{}", value);
}

void check_range(double value, const std::string& written, const Place& place, const Range& range) {
  const bool below = range.open_min ? value <= range.min : value < range.min;
  const bool above = range.open_max ? value >= range.max : value > range.max;
  if (below || above) {
    fail<UsageError>("{}: {} must be {}, not {}", place.source, place.key, describe(range), written);
  }
}

std::int64_t integer_in(const toml::node& node, const Place& place, const Range& range, std::string_view expected) {
  const auto* integer = node.as_integer();
  if (integer == nullptr) wrong_type(node, place, expected);
  check_range(static_cast<double>(**integer), write_value(**integer), place, range);
  return **integer;
}

// Like integer_in, for what is counted in ranks, threads and units.
int small_integer_in(const toml::node& node, const Place& place, const Range& range, std::string_view expected) {
  const std::int64_t value = integer_in(node, place, range, expected);
  if (value > std::numeric_limits<int>::max()) {
    fail<UsageError>("{}: {} must be at most {}, not {}", place.source, place.key, std::numeric_limits<int>::max(),
                     value);
  }
  return static_cast<int>(value);
}

double float_in(const toml::node& node, const Place& place, const Range& range) {
  double value = 0;
  if (const auto* real = node.as_floating_point()) {
    value = **real;
  } else if (const auto* integer = node.as_integer()) {
    value = static_cast<double>(**integer);
  } else {
    wrong_type(node, place, "a float");
  }
  if (!std::isfinite(value)) {
    fail<UsageError>("{}: {} must be a finite number, not {}", place.source, place.key, value);
  }
  // Tensors take it as an fp32.
  if (std::abs(value) > std::numeric_limits<float>::max()) {
    fail<UsageError>("{}: {} must be within the range of fp32, up to {:.3g}, and not {}", place.source, place.key,
                     std::numeric_limits<float>::max(), value);
  }
  check_range(value, number_text(value), place, range);
  return value;
}

std::string join_list(const std::vector<std::string>& written) { return fmt::format("[{}]", fmt::join(written, ", ")); }

}  // namespace

toml::table parse_toml(std::string_view text, const std::string& file) {
  try {
    return toml::parse(text, std::string_view(file));
  } catch (const toml::parse_error& e) {
    const auto at = e.source().begin;
    fail<UsageError>("{}:{}:{}: {}", file, at.line, at.column, e.description());
  }
}

std::string describe(const Range& range) {
  if (range.not_empty) return "not empty";
  const std::string low = number_text(range.min);
  const std::string high = number_text(range.max);
  if (std::isinf(range.max)) {
    return std::isinf(range.min) ? "" : (range.open_min ? "more than " : "at least ") + low;
  }
  return fmt::format("at least {} and {} {}", low, range.open_max ? "less than" : "at most", high);
}

void read_value(const toml::node& node, const Place& place, const Range&, bool& value) {
  if (!node.is_boolean()) wrong_type(node, place, "true or false");
  value = **node.as_boolean();
}

void read_value(const toml::node& node, const Place& place, const Range& range, int& value) {
  value = small_integer_in(node, place, range, "an integer");
}

void read_value(const toml::node& node, const Place& place, const Range& range, std::int64_t& value) {
  value = integer_in(node, place, range, "an integer");
}

void read_value(const toml::node& node, const Place& place, const Range& range, double& value) {
  value = float_in(node, place, range);
}

void read_value(const toml::node& node, const Place& place, const Range& range, std::string& value) {
  if (!node.is_string()) wrong_type(node, place, "a string");
  value = **node.as_string();
  if (range.not_empty && value.empty()) fail<UsageError>("{}: {} must not be empty", place.source, place.key);
}

void read_value(const toml::node& node, const Place& place, const Range& range, std::vector<std::string>& value) {
  value.clear();
  if (node.is_string()) return read_value(node, place, range, value.emplace_back());
  if (!node.is_array()) wrong_type(node, place, "a string or a list of strings");
  for (const auto& item : *node.as_array()) {
    if (!item.is_string()) wrong_type(item, place, "a string or a list of strings");
    read_value(item, place, range, value.emplace_back());
  }
  if (range.not_empty && value.empty()) fail<UsageError>("{}: {} must not be empty", place.source, place.key);
}

void read_value(const toml::node& node, const Place& place, const Range& range, topology::NumberOrList& value) {
  constexpr std::string_view expected = "an integer or a list of integers";
  if (!node.is_array()) {
    value = small_integer_in(node, place, range, expected);
    return;
  }
  std::vector<int> numbers;
  for (const auto& item : *node.as_array()) numbers.push_back(small_integer_in(item, place, range, expected));
  if (numbers.empty()) fail<UsageError>("{}: {} must not be an empty list", place.source, place.key);
  value = std::move(numbers);
}

void read_value(const toml::node& node, const Place& place, const Range& range, GroupWeights& value) {
  if (node.is_string()) return read_value(node, place, range, value.emplace<WeightsBy>());
  if (!node.is_array()) wrong_type(node, place, "a string or a list of numbers");
  std::vector<double> numbers;
  for (const auto& item : *node.as_array()) numbers.push_back(float_in(item, place, range));
  value = std::move(numbers);
}

void read_value(const toml::node& node, const Place& place, const Range& range, plan::Pace& value) {
  constexpr std::string_view expected = "an integer, a list of integers, or a string such as \"30s\"";
  if (node.is_string()) {
    try {
      value = plan::parse_pace(**node.as_string());
    } catch (const UsageError& e) {
      fail<UsageError>("{}: {}: {}", place.source, place.key, e.what());
    }
  } else if (node.is_array()) {
    value = {.by = plan::Pace::By::group_steps};
    for (const auto& item : *node.as_array()) value.by_group.push_back(integer_in(item, place, range, expected));
    if (value.by_group.empty()) fail<UsageError>("{}: {} must not be an empty list", place.source, place.key);
  } else {
    value = plan::Pace::of_steps(integer_in(node, place, range, expected));
  }
}

void read_value(const toml::node& node, const Place& place, const Range& range, topology::Buckets& value) {
  std::string text;
  read_value(node, place, range, text);
  try {
    value = topology::buckets_of(text);
  } catch (const UsageError& e) {
    fail<UsageError>("{}: {}: {}", place.source, place.key, e.what());
  }
}

void read_value(const toml::node& node, const Place& place, const Range&, model::RopeScaling& value) {
  if (!node.is_table()) wrong_type(node, place, "a table such as { rope_type = \"llama3\", factor = 8.0, ... }");
  const auto& table = *node.as_table();
  const std::vector<std::string> names = {"rope_type", "factor", "low_freq_factor", "high_freq_factor",
                                          "original_max_position_embeddings"};
  for (const auto& [name, item] : table) {
    if (std::find(names.begin(), names.end(), name.str()) != names.end()) continue;
    fail<UsageError>("{}: {} has no key '{}'; its keys are {}", place.source, place.key, name.str(),
                     fmt::join(names, ", "));
  }
  for (const auto& name : names) {
    if (!table.contains(name)) fail<UsageError>("{}: {} lacks '{}'", place.source, place.key, name);
  }
  const auto inner = [&](const char* name) { return Place{place.source, place.key + "." + name}; };
  read_choice(*table.get("rope_type"), inner("rope_type"), {"llama3"});
  read_value(*table.get("factor"), inner("factor"), at_least(1), value.factor);
  read_value(*table.get("low_freq_factor"), inner("low_freq_factor"), more_than(0), value.low_freq_factor);
  read_value(*table.get("high_freq_factor"), inner("high_freq_factor"), more_than(0), value.high_freq_factor);
  read_value(*table.get("original_max_position_embeddings"), inner("original_max_position_embeddings"), at_least(1),
             value.original_max_position_embeddings);
  if (value.high_freq_factor <= value.low_freq_factor) {
    fail<UsageError>("{}: {}: high_freq_factor ({}) must be more than low_freq_factor ({})", place.source, place.key,
                     number_text(value.high_freq_factor), number_text(value.low_freq_factor));
  }
}

std::size_t read_choice(const toml::node& node, const Place& place, const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const auto& name : names) quoted.push_back(fmt::format("\"{}\"", name));
  for (std::size_t i = 0; node.is_string() && i < names.size(); ++i) {
    if (**node.as_string() == names[i]) return i;
  }
  wrong_type(node, place, fmt::format("{}", fmt::join(quoted, " or ")));
}

std::string write_value(bool value) { return value ? "true" : "false"; }

std::string write_value(std::int64_t value) { return fmt::format("{}", value); }

// The shortest decimal that reads back to the same double; TOML wants a point or an exponent in it.
std::string write_value(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_not_of("-0123456789") == std::string::npos) text += ".0";
  return text;
}

// A JSON string is a TOML string, but for DEL, which TOML wants escaped.
std::string write_value(const std::string& value) {
  if (value.empty()) return "";
  std::string text;
  try {
    text = nlohmann::json(value).dump();
  } catch (const nlohmann::json::exception&) {
    fail<UsageError>("'{}' is not UTF-8, so a configuration file cannot hold it; give it another name", value);
  }
  for (auto at = text.find('\x7f'); at != std::string::npos; at = text.find('\x7f', at)) text.replace(at, 1, "\\u007F");
  return text;
}

std::string write_value(const std::vector<std::string>& value) {
  std::vector<std::string> written;
  for (const auto& item : value) written.push_back(write_value(item));
  return value.empty() ? "" : join_list(written);
}

std::string write_value(const topology::NumberOrList& value) {
  if (const int* number = std::get_if<int>(&value)) return write_value(*number);
  std::vector<std::string> written;
  for (const int item : std::get<std::vector<int>>(value)) written.push_back(write_value(item));
  return join_list(written);
}

std::string write_value(const GroupWeights& value) {
  if (const WeightsBy* by = std::get_if<WeightsBy>(&value)) return write_value(*by);
  std::vector<std::string> written;
  for (const double item : std::get<std::vector<double>>(value)) written.push_back(write_value(item));
  return join_list(written);
}

std::string write_value(const plan::Pace& value) {
  const bool as_text = value.by == plan::Pace::By::tokens || value.by == plan::Pace::By::seconds;
  return as_text ? write_value(plan::describe(value)) : plan::describe(value);
}

std::string write_value(const topology::Buckets& value) { return write_value(topology::text_of(value)); }

std::string write_value(const model::RopeScaling& value) {
  return fmt::format(
      "{{ rope_type = \"llama3\", factor = {}, low_freq_factor = {}, high_freq_factor = {}, "
      "original_max_position_embeddings = {} }}",
      write_value(value.factor), write_value(value.low_freq_factor), write_value(value.high_freq_factor),
      write_value(value.original_max_position_embeddings));
}

}  // namespace fedshard::config
