#include "fedshard/control/messages.h"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "fedshard/base/error.h"

namespace fedshard::control {
namespace {

using nlohmann::json;

// Why a frame is refused; never leaves this file.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reads fields strictly: nlohmann's own conversions turn 1.5 and true into integers.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {
    if (!object.is_object()) throw Refused("not an object");
  }

  const json& at(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end()) throw Refused(fmt::format("'{}' is missing", name));
    return *found;
  }
  std::int64_t integer(const char* name, std::int64_t low = 0,
                       std::int64_t high = std::numeric_limits<std::int64_t>::max()) const {
    return to_integer(name, at(name), low, high);
  }
  int small(const char* name, int low = 0) const {
    return static_cast<int>(integer(name, low, std::numeric_limits<int>::max()));
  }
  std::uint64_t bits(const char* name) const {
    const json& value = at(name);
    if (!value.is_number_unsigned()) throw Refused(fmt::format("'{}' is not an unsigned integer", name));
    return value.get<std::uint64_t>();
  }
  double real(const char* name) const { return to_real(name, at(name)); }
  std::vector<double> reals(const char* name) const {
    std::vector<double> list;
    for (const json& item : array(name)) list.push_back(to_real(name, item));
    return list;
  }
  bool flag(const char* name) const {
    const json& value = at(name);
    if (!value.is_boolean()) throw Refused(fmt::format("'{}' is not true or false", name));
    return value.get<bool>();
  }
  std::string text(const char* name) const {
    const json& value = at(name);
    if (!value.is_string()) throw Refused(fmt::format("'{}' is not a string", name));
    return value.get<std::string>();
  }
  json object(const char* name) const {
    const json& value = at(name);
    if (!value.is_object()) throw Refused(fmt::format("'{}' is not an object", name));
    return value;
  }
  template <class T>
  std::vector<T> integers(const char* name) const {
    std::vector<T> list;
    for (const json& item : array(name)) {
      list.push_back(static_cast<T>(to_integer(name, item, 0, std::numeric_limits<T>::max())));
    }
    return list;
  }

 private:
  const json& array(const char* name) const {
    const json& value = at(name);
    if (!value.is_array()) throw Refused(fmt::format("'{}' is not a list", name));
    return value;
  }
  static double to_real(const char* name, const json& value) {
    if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (!value.is_number()) throw Refused(fmt::format("'{}' is not a number", name));
    return value.get<double>();
  }
  static std::int64_t to_integer(const char* name, const json& value, std::int64_t low, std::int64_t high) {
    if (!value.is_number_integer()) throw Refused(fmt::format("'{}' is not an integer", name));
    // A number beyond 2^63 would come out negative.
    const bool huge = value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(high);
    const auto number = huge ? high : value.get<std::int64_t>();
    if (huge || number < low || number > high) throw Refused(fmt::format("'{}' is out of range", name));
    return number;
  }

  const json& object_;
};

constexpr int kMaxStatus = 255;
constexpr int kMostNested = 32;  // the JSON library reads any depth, but copies and writes by recursion

json fields_of(const Hello& m) {
  return {{"rank", m.rank}, {"group", m.group},     {"pid", m.pid},
          {"host", m.host}, {"version", m.version}, {"config_digest", m.config_digest}};
}
void read(Hello& m, const Fields& f) {
  m = {f.small("rank"), f.small("group"), f.integer("pid"), f.text("host"), f.text("version"), f.text("config_digest")};
}

json fields_of(const Heartbeat& m) {
  return {{"step", m.step}, {"collective", m.collective}, {"collective_name", m.collective_name}};
}
void read(Heartbeat& m, const Fields& f) {
  m = {f.integer("step"), f.integer("collective"), f.text("collective_name")};
}

json fields_of(const Record& m) { return {{"line", m.line}}; }
void read(Record& m, const Fields& f) {
  m.line = f.object("line");
  Fields(m.line).text("kind");
}

json fields_of(const Proposal& m) {
  return {
      {"round", m.round}, {"group", m.group}, {"tokens", m.tokens}, {"wants_stop", m.wants_stop}, {"steps", m.steps}};
}
void read(Proposal& m, const Fields& f) {
  m = {f.integer("round"), f.small("group"), f.integer("tokens"), f.flag("wants_stop"), f.integer("steps")};
}

json fields_of(const Ready& m) { return {{"round", m.round}, {"epoch", m.epoch}}; }
void read(Ready& m, const Fields& f) { m = {f.integer("round"), f.integer("epoch")}; }

json fields_of(const Digest& m) {
  const metrics::TrafficRecord& traffic = m.measures.traffic;
  return {{"round", m.round},
          {"group", m.group},
          {"sum", m.sum},
          {"step", m.measures.step},
          {"weights", m.measures.weights},
          {"left_out", m.measures.left_out},
          {"seconds", m.measures.seconds},
          {"exposed_seconds", m.measures.exposed_seconds},
          {"drift_square", m.measures.drift_square},
          {"fragment", m.measures.fragment},
          {"change", {m.measures.change_square, m.measures.change_with_mean, m.measures.mean_change_square}},
          {"traffic",
           {traffic.intra_group, traffic.inter_group, traffic.gather, traffic.reduce, traffic.replica,
            traffic.aggregate, traffic.state, traffic.control}}};
}
void read(Digest& m, const Fields& f) {
  m = {f.integer("round"),
       f.small("group"),
       f.bits("sum"),
       {f.integer("step"), f.reals("weights"), f.integers<int>("left_out"), f.real("seconds"),
        f.real("exposed_seconds"), f.real("drift_square"), f.small("fragment")}};
  const std::vector<double> change = f.reals("change");
  const std::vector<std::int64_t> bytes = f.integers<std::int64_t>("traffic");
  if (change.size() != 3 || bytes.size() != 8) throw Refused("'change' or 'traffic' has another length");
  m.measures.change_square = change[0];
  m.measures.change_with_mean = change[1];
  m.measures.mean_change_square = change[2];
  m.measures.traffic = {0, 0, bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]};
}

json fields_of(const RankError& m) {
  return {{"rank", m.rank}, {"group", m.group}, {"message", m.message}, {"status", m.status}};
}
void read(RankError& m, const Fields& f) {
  m = {f.small("rank", -1), f.small("group", -1), f.text("message"),
       static_cast<int>(f.integer("status", 1, kMaxStatus))};
}

json fields_of(const Goodbye& m) { return {{"status", m.status}}; }
void read(Goodbye& m, const Fields& f) { m.status = static_cast<int>(f.integer("status", 0, kMaxStatus)); }

json fields_of(const Welcome&) { return json::object(); }
void read(Welcome&, const Fields&) {}

json fields_of(const Alive&) { return json::object(); }
void read(Alive&, const Fields&) {}

json fields_of(const RoundPlan& m) {
  return {{"round", m.round},   {"epoch", m.epoch}, {"participants", m.participants},
          {"tokens", m.tokens}, {"stop", m.stop},   {"steps", m.steps}};
}
void read(RoundPlan& m, const Fields& f) {
  m = {f.integer("round"),
       f.integer("epoch"),
       f.integers<int>("participants"),
       f.integers<std::int64_t>("tokens"),
       f.flag("stop"),
       f.integers<std::int64_t>("steps")};
  if (m.tokens.size() != m.participants.size() || m.steps.size() != m.participants.size()) {
    throw Refused("'tokens' or 'steps' and 'participants' differ in length");
  }
}

json fields_of(const Commit& m) { return {{"round", m.round}, {"epoch", m.epoch}, {"participants", m.participants}}; }
void read(Commit& m, const Fields& f) { m = {f.integer("round"), f.integer("epoch"), f.integers<int>("participants")}; }

json fields_of(const DigestResult& m) { return {{"round", m.round}, {"digest", m.digest}}; }
void read(DigestResult& m, const Fields& f) { m = {f.integer("round"), f.bits("digest")}; }

json fields_of(const Abort& m) { return {{"reason", m.reason}, {"status", m.status}}; }
void read(Abort& m, const Fields& f) { m = {f.text("reason"), static_cast<int>(f.integer("status", 1, kMaxStatus))}; }

// Tries the types of the variant from the first on.
template <std::size_t I = 0>
Message read_as(const std::string& type, const Fields& fields) {
  if constexpr (I == std::variant_size_v<Message>) {
    throw Refused(fmt::format("unknown type '{}'", type));
  } else {
    using Type = std::variant_alternative_t<I, Message>;
    if (type != Type::kType) return read_as<I + 1>(type, fields);
    Type message;
    read(message, fields);
    return message;
  }
}

}  // namespace

std::string encode(const Message& message) {
  json object = std::visit(
      [](const auto& m) {
        json fields = fields_of(m);
        fields["type"] = m.kType;
        return fields;
      },
      message);
  object["v"] = kProtocolVersion;
  std::string frame = object.dump(-1, ' ', false, json::error_handler_t::replace);
  if (frame.size() > kMaxFrameBytes) {
    base::fail<base::RunError>("a control message of type {} has {} bytes, more than the {} that are allowed",
                               object["type"].get<std::string>(), frame.size(), kMaxFrameBytes);
  }
  return frame;
}

std::optional<Message> decode(std::string_view frame, std::string& why) {
  if (frame.size() > kMaxFrameBytes) {
    why = fmt::format("{} bytes are too long", frame.size());
    return std::nullopt;
  }
  try {
    const json object = json::parse(frame, [](int depth, json::parse_event_t, const json&) {
      if (depth > kMostNested) throw Refused(fmt::format("nested more than {} deep", kMostNested));
      return true;
    });
    const Fields fields(object);
    const auto version = fields.integer("v");
    if (version != kProtocolVersion) throw Refused(fmt::format("protocol version {}", version));
    return read_as(fields.text("type"), fields);
  } catch (const json::exception& e) {
    why = e.what();
  } catch (const Refused& e) {
    why = e.what();
  }
  return std::nullopt;
}

}  // namespace fedshard::control
