// TOML values and the C++ types that keys have: how each type is read, written and named in messages.
// A surprise: integers are never made from floats (`steps = 1e3` is refused, as TOML calls it a float), while a float
// may be written as an integer (`lr = 1`).
#pragma once
#include <toml++/toml.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fedshard/config/config.h"

namespace fedshard::config {

// What a key is called in messages, and where its value stands: "run.toml:12: [training] steps".
struct Place {
  std::string source;  // "run.toml:12" or "--set training.steps=x"
  std::string key;     // "[training] steps"
};

// A file's text. Throws UsageError naming file, line and column for what is no TOML.
toml::table parse_toml(std::string_view text, const std::string& file);

// Bounds of numbers (each number of a list), inclusive unless `open_min`; text and lists may be asked not to be empty.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool open_min = false;
  bool open_max = false;
  bool not_empty = false;
};
constexpr Range at_least(double min) { return {.min = min}; }
constexpr Range more_than(double min) { return {.min = min, .open_min = true}; }
constexpr Range between(double min, double max) { return {.min = min, .max = max}; }
constexpr Range from_below(double min, double max) { return {.min = min, .max = max, .open_max = true}; }
inline constexpr Range not_empty{.not_empty = true};
std::string describe(const Range& range);  // "at least 1"; empty where everything goes

// The names of an enum's values, in the order of docs and messages.
template <class E>
struct Choices;
template <>
struct Choices<Dtype> {
  static constexpr std::array<std::pair<const char*, Dtype>, 2> all{{{"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}}};
};
template <>
struct Choices<OptimizerName> {
  static constexpr std::array<std::pair<const char*, OptimizerName>, 3> all{
      {{"adamw", OptimizerName::adamw}, {"sgd", OptimizerName::sgd}, {"muon", OptimizerName::muon}}};
};
template <>
struct Choices<Decay> {
  static constexpr std::array<std::pair<const char*, Decay>, 3> all{
      {{"cosine", Decay::cosine}, {"linear", Decay::linear}, {"none", Decay::none}}};
};
template <>
struct Choices<WeightsBy> {
  static constexpr std::array<std::pair<const char*, WeightsBy>, 2> all{
      {{"tokens", WeightsBy::tokens}, {"uniform", WeightsBy::uniform}}};
};
template <>
struct Choices<InnerState> {
  static constexpr std::array<std::pair<const char*, InnerState>, 3> all{
      {{"keep", InnerState::keep}, {"average", InnerState::average}, {"reset", InnerState::reset}}};
};
template <>
struct Choices<plan::Outer> {
  static constexpr std::array<std::pair<const char*, plan::Outer>, 6> all{{{"fedavg", plan::Outer::fedavg},
                                                                           {"fedavgm", plan::Outer::fedavgm},
                                                                           {"nesterov", plan::Outer::nesterov},
                                                                           {"fedadam", plan::Outer::fedadam},
                                                                           {"fedyogi", plan::Outer::fedyogi},
                                                                           {"fedadagrad", plan::Outer::fedadagrad}}};
};
template <>
struct Choices<plan::Compression::Kind> {
  using Kind = plan::Compression::Kind;
  static constexpr std::array<std::pair<const char*, Kind>, 5> all{
      {{"none", Kind::none}, {"bf16", Kind::bf16}, {"int8", Kind::int8}, {"int4", Kind::int4}, {"topk", Kind::topk}}};
};
template <>
struct Choices<topology::Scheme> {
  static constexpr std::array<std::pair<const char*, topology::Scheme>, 3> all{
      {{"split", topology::Scheme::split}, {"leader", topology::Scheme::leader}, {"naive", topology::Scheme::naive}}};
};
template <>
struct Choices<BackendChoice> {
  static constexpr std::array<std::pair<const char*, BackendChoice>, 3> all{
      {{"auto", BackendChoice::automatic}, {"gloo", BackendChoice::gloo}, {"nccl", BackendChoice::nccl}}};
};

template <>
struct Choices<NonFinite> {
  static constexpr std::array<std::pair<const char*, NonFinite>, 2> all{
      {{"stop", NonFinite::stop}, {"skip", NonFinite::skip}}};
};
template <>
struct Choices<ActivationCheckpoint> {
  static constexpr std::array<std::pair<const char*, ActivationCheckpoint>, 3> all{
      {{"none", ActivationCheckpoint::none},
       {"selective", ActivationCheckpoint::selective},
       {"full", ActivationCheckpoint::full}}};
};

// read_value throws UsageError naming the place, what was expected and what was found. write_value gives TOML, or
// nothing for a value that is not set (an empty optional, text or list). type_name is for messages and docs.
void read_value(const toml::node& node, const Place& place, const Range& range, bool& value);
void read_value(const toml::node& node, const Place& place, const Range& range, int& value);
void read_value(const toml::node& node, const Place& place, const Range& range, std::int64_t& value);
void read_value(const toml::node& node, const Place& place, const Range& range, double& value);
void read_value(const toml::node& node, const Place& place, const Range& range, std::string& value);
void read_value(const toml::node& node, const Place& place, const Range& range, std::vector<std::string>& value);
void read_value(const toml::node& node, const Place& place, const Range& range, topology::NumberOrList& value);
void read_value(const toml::node& node, const Place& place, const Range& range, GroupWeights& value);
void read_value(const toml::node& node, const Place& place, const Range& range, plan::Pace& value);
void read_value(const toml::node& node, const Place& place, const Range& range, topology::Buckets& value);
void read_value(const toml::node& node, const Place& place, const Range& range, model::RopeScaling& value);

std::string write_value(bool value);
std::string write_value(std::int64_t value);
inline std::string write_value(int value) { return write_value(std::int64_t{value}); }
std::string write_value(double value);
std::string write_value(const std::string& value);
std::string write_value(const std::vector<std::string>& value);
std::string write_value(const topology::NumberOrList& value);
std::string write_value(const GroupWeights& value);
std::string write_value(const plan::Pace& value);
std::string write_value(const topology::Buckets& value);
std::string write_value(const model::RopeScaling& value);

inline std::string type_name(bool) { return "true or false"; }
inline std::string type_name(std::int64_t) { return "integer"; }
inline std::string type_name(int) { return "integer"; }
inline std::string type_name(double) { return "float"; }
inline std::string type_name(const std::string&) { return "string"; }
inline std::string type_name(const std::vector<std::string>&) { return "string or list of strings"; }
inline std::string type_name(const topology::NumberOrList&) { return "integer or list of integers"; }
inline std::string type_name(const GroupWeights&) { return "string or list of floats"; }
inline std::string type_name(const plan::Pace&) { return "integer, list of integers, or string"; }
inline std::string type_name(const topology::Buckets&) { return "string"; }
inline std::string type_name(const model::RopeScaling&) { return "inline table"; }

// An enum's value by its name among `names`; refuses others, listing all.
std::size_t read_choice(const toml::node& node, const Place& place, const std::vector<std::string>& names);

template <class E>
std::vector<std::string> choice_names() {
  std::vector<std::string> names;
  for (const auto& [name, value] : Choices<E>::all) names.emplace_back(name);
  return names;
}
template <class E, class = std::enable_if_t<std::is_enum_v<E>>>
void read_value(const toml::node& node, const Place& place, const Range&, E& value) {
  value = Choices<E>::all[read_choice(node, place, choice_names<E>())].second;
}
template <class E, class = std::enable_if_t<std::is_enum_v<E>>>
std::string write_value(E value) {
  std::string text;
  for (const auto& [name, choice] : Choices<E>::all) {
    if (choice == value) text = write_value(std::string(name));
  }
  return text;
}
template <class E, class = std::enable_if_t<std::is_enum_v<E>>>
std::string type_name(E) {
  return "string";
}

template <class T>
void read_value(const toml::node& node, const Place& place, const Range& range, std::optional<T>& value) {
  read_value(node, place, range, value.emplace());
}
template <class T>
std::string write_value(const std::optional<T>& value) {
  return value ? write_value(*value) : "";
}
template <class T>
std::string type_name(const std::optional<T>&) {
  return type_name(T{});
}

}  // namespace fedshard::config
