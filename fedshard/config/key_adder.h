// Makes the keys of one table, one after another: what the table of keys (keys.cpp) is written with.
// A surprise: a key's default, type and spelling all come from a pointer to the struct's member.
#pragma once
#include <fmt/ranges.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fedshard/config/keys.h"

namespace fedshard::config {

template <class T>
std::string allowed_values(const T&, const Range& range) {
  if constexpr (std::is_enum_v<T>) {
    std::vector<std::string> quoted;
    for (const auto& name : choice_names<T>()) quoted.push_back("\"" + name + "\"");
    return fmt::format("{}", fmt::join(quoted, ", "));
  } else {
    return describe(range);
  }
}

inline constexpr std::size_t kLast = -1;

// Where a table's struct is in a config. Takes configs that are const or not.
template <class Table>
struct MemberAt {
  MemberAt(Table Config::*m) : member(m) {}
  auto& operator()(auto& config, std::size_t) const { return config.*member; }
  Table Config::*member;
};
struct ParameterGroupAt {
  auto& operator()(auto& config, std::size_t index) const {
    auto& groups = config.optimizer.groups;
    return index == kLast ? groups.back() : groups.at(index);
  }
};

// Makes keys of one table from pointers to its struct's members.
template <class Table, class At = MemberAt<Table>>
class Adder {
 public:
  Adder(std::vector<Key>& keys, std::string table, At at) : keys_(keys), table_(std::move(table)), at_(at) {}

  template <class T>
  Adder& key(const char* name, T Table::*member, const Range& range, const char* doc) {
    Key key;
    key.table = table_;
    key.name = name;
    key.doc = doc;
    const T fallback = Table{}.*member;
    key.type = type_name(fallback);
    key.allowed = allowed_values(fallback, range);
    key.fallback = write_value(fallback);
    key.takes_text = std::is_enum_v<T> || std::is_same_v<T, std::string> ||
                     std::is_same_v<T, std::vector<std::string>> || std::is_same_v<T, topology::Buckets>;
    key.read = [at = at_, member, range](Config& config, const toml::node& node, const Place& place) {
      read_value(node, place, range, at(config, kLast).*member);
    };
    key.write = [at = at_, member](const Config& config, std::size_t index) {
      return write_value(at(config, index).*member);
    };
    key.applies = [](const Config&) { return true; };
    keys_.push_back(std::move(key));
    return *this;
  }

  // How docs name the default of the key just added, where it depends on others.
  Adder& by_default(const char* fallback) {
    keys_.back().fallback = fallback;
    return *this;
  }

  // The key just added counts only where `applies` holds.
  Adder& only_when(const char* applies_when, bool (*applies)(const Config&)) {
    keys_.back().applies_when = applies_when;
    keys_.back().applies = applies;
    return *this;
  }

 private:
  std::vector<Key>& keys_;
  std::string table_;
  At at_;
};

inline constexpr Range any{};

}  // namespace fedshard::config
