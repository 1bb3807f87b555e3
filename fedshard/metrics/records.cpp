#include "fedshard/metrics/records.h"

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "fedshard/base/error.h"

namespace fedshard::metrics {
namespace {

using nlohmann::json;

template <class R, class T>
concept Of = std::same_as<std::remove_const_t<R>, T>;

// The fields of each kind, named once for writing and reading.
template <Of<StartRecord> R, class Visit>
void visit_fields(R& r, Visit&& visit) {
  visit("strategy", r.strategy);
  visit("world", r.world);
  visit("groups", r.groups);
  visit("shard", r.shard);
  visit("replicas", r.replicas);
  visit("params", r.params);
  visit("memory", r.memory);
  visit("memory_peak", r.memory_peak);
  visit("versions", r.versions);
}
template <Of<StepRecord> R, class Visit>
void visit_fields(R& r, Visit&& visit) {
  visit("group", r.group);
  visit("loss", r.loss);
  visit("grad_norm", r.grad_norm);
  visit("lr", r.lr);
  visit("tokens", r.tokens);
  visit("tokens_per_s", r.tokens_per_s);
}
template <Of<RoundRecord> R, class Visit>
void visit_fields(R& r, Visit&& visit) {
  visit("round", r.round);
  visit("fragment", r.fragment);
  visit("seconds", r.seconds);
  visit("exposed_seconds", r.exposed_seconds);
  visit("participants", r.participants);
  visit("steps", r.steps);
  visit("weights", r.weights);
  visit("left_out", r.left_out);
  visit("drift", r.drift);
  visit("change_norm", r.change_norm);
  visit("cosine", r.cosine);
  visit("tokens_per_s", r.tokens_per_s);
  visit("digest", r.digest);
}
template <Of<EvalRecord> R, class Visit>
void visit_fields(R& r, Visit&& visit) {
  visit("loss", r.loss);
  visit("perplexity", r.perplexity);
  visit("tokens", r.tokens);
  visit("model", r.model);
  visit("group", r.group);
}
template <Of<TrafficRecord> R, class Visit>
void visit_fields(R& r, Visit&& visit) {
  visit("intra_group", r.intra_group);
  visit("inter_group", r.inter_group);
  visit("gather", r.gather);
  visit("reduce", r.reduce);
  visit("replica", r.replica);
  visit("aggregate", r.aggregate);
  visit("state", r.state);
  visit("control", r.control);
}
template <Of<EndRecord> R, class Visit>
void visit_fields(R& r, Visit&& visit) {
  visit("steps", r.steps);
  visit("tokens", r.tokens);
  visit("skipped", r.skipped);
  visit("seconds", r.seconds);
  visit("tokens_per_s", r.tokens_per_s);
  visit("peak_rss_bytes", r.peak_rss_bytes);
  visit("peak_tensor_bytes", r.peak_tensor_bytes);
}

constexpr const char* kind_names[] = {"start", "step", "round", "eval", "traffic", "end"};
static_assert(std::size(kind_names) == std::variant_size_v<Record>);

struct Write {
  json& line;
  template <class T>
  void operator()(const char* name, const T& value) const {
    line[name] = value;
  }
  void operator()(const char* name, const std::optional<int>& value) const {
    if (value) line[name] = *value;
  }
  void operator()(const char* name, const NumberOrList& value) const {
    std::visit([&](const auto& v) { line[name] = v; }, value);
  }
  void operator()(const char* name, EvalModel value) const { line[name] = value == EvalModel::mean ? "mean" : "group"; }
};

struct Read {
  const json& line;
  void operator()(const char* name, double& value) const { value = number(line.at(name)); }
  void operator()(const char* name, std::vector<double>& value) const {
    value.clear();
    for (const json& item : line.at(name)) value.push_back(number(item));
  }
  void operator()(const char* name, std::optional<int>& value) const {
    value = line.contains(name) ? std::optional(line.at(name).get<int>()) : std::nullopt;
  }
  void operator()(const char* name, NumberOrList& value) const {
    const json& item = line.at(name);
    value = item.is_array() ? NumberOrList(item.get<std::vector<int>>()) : NumberOrList(item.get<int>());
  }
  void operator()(const char* name, EvalModel& value) const {
    const auto text = line.at(name).get<std::string>();
    if (text != "mean" && text != "group") {
      base::fail<base::RunError>("a record of kind 'eval' cannot be read: model '{}' is neither mean nor group", text);
    }
    value = text == "mean" ? EvalModel::mean : EvalModel::group;
  }
  template <class T>
  void operator()(const char* name, T& value) const {
    line.at(name).get_to(value);
  }
  static double number(const json& item) {
    return item.is_null() ? std::numeric_limits<double>::quiet_NaN() : item.get<double>();
  }
};

template <class R>
Record read_record(const json& line) {
  R record;
  const Read read{line};
  read("step", record.step);
  read("time_s", record.time_s);
  visit_fields(record, read);
  return record;
}

// Replaces what is not finite in `value`; true where there was something.
bool make_finite(json& value) {
  bool found = false;
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    value = nullptr;
    return true;
  }
  if (value.is_structured()) {
    for (json& item : value) found |= make_finite(item);
  }
  return found;
}

}  // namespace

json to_json(const Record& record) {
  json line;
  line["kind"] = kind_names[record.index()];
  std::visit(
      [&](const auto& r) {
        line["step"] = r.step;
        line["time_s"] = r.time_s;
        visit_fields(r, Write{line});
      },
      record);
  return finite(std::move(line));
}

Record record_from_json(const json& line) {
  constexpr Record (*readers[])(const json&) = {read_record<StartRecord>,   read_record<StepRecord>,
                                                read_record<RoundRecord>,   read_record<EvalRecord>,
                                                read_record<TrafficRecord>, read_record<EndRecord>};
  static_assert(std::size(readers) == std::size(kind_names));
  std::string kind;
  try {
    kind = line.at("kind").get<std::string>();
    for (std::size_t i = 0; i < std::size(kind_names); ++i) {
      if (kind == kind_names[i]) return readers[i](line);
    }
  } catch (const json::exception& e) {
    base::fail<base::RunError>("a record of kind '{}' cannot be read: {}", kind, e.what());
  }
  base::fail<base::RunError>("a record of the unknown kind '{}' cannot be read", kind);
}

TrafficRecord& TrafficRecord::operator+=(const TrafficRecord& other) {
  intra_group += other.intra_group;
  inter_group += other.inter_group;
  gather += other.gather;
  reduce += other.reduce;
  replica += other.replica;
  aggregate += other.aggregate;
  state += other.state;
  control += other.control;
  return *this;
}

json finite(json line) {
  json names = json::array();
  for (const auto& [name, value] : line.items()) {
    if (make_finite(value)) names.push_back(name);
  }
  if (names.empty()) return line;
  json& listed = line["nonfinite"];
  for (const json& name : names) {
    if (std::find(listed.begin(), listed.end(), name) == listed.end()) listed.push_back(name);
  }
  return line;
}

}  // namespace fedshard::metrics
