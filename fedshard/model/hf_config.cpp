#include "fedshard/model/hf_config.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"

namespace fedshard::model {

using base::DamagedError;
using base::fail;
using base::UsageError;
using nlohmann::json;

namespace {

constexpr int kMostNested = 64;  // the JSON library reads any depth, but writes and compares by recursion

// A JSON object whose errors name the file and the key.
class Reader {
 public:
  Reader(const json& object, std::string source) : object_(object), source_(std::move(source)) {}

  const std::string& source() const { return source_; }

  // Null counts as absent, as in transformers.
  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  std::optional<std::int64_t> integer(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_integer()) wrong_type(key, "an integer");
    return value->get<std::int64_t>();
  }

  std::optional<double> number(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number()) wrong_type(key, "a number");
    return value->get<double>();
  }

  std::optional<bool> boolean(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) wrong_type(key, "true or false");
    return value->get<bool>();
  }

  std::optional<std::string> text(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) wrong_type(key, "a string");
    return value->get<std::string>();
  }

  std::optional<Reader> object(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_object()) wrong_type(key, "an object");
    return Reader(*value, source_ + ": " + key);
  }

  template <class T>
  T required(const char* key, std::optional<T> value) const {
    if (!value) fail<DamagedError>("{}: '{}' is missing", source_, key);
    return *value;
  }

 private:
  [[noreturn]] void wrong_type(const char* key, const char* wanted) const {
    fail<DamagedError>("{}: '{}' is {}, not {}", source_, key, object_.at(key).dump(), wanted);
  }

  const json& object_;
  std::string source_;
};

void refuse_other_architectures(const Reader& config) {
  const auto type = config.text("model_type");
  if (type && *type != "llama") {
    fail<UsageError>("{}: model_type '{}' is not supported; fedshard trains 'llama' models", config.source(), *type);
  }
  const json* architectures = config.find("architectures");
  if (architectures == nullptr) {
    if (!type) fail<UsageError>("{}: names neither model_type nor architectures", config.source());
    return;
  }
  if (*architectures != json::array({"LlamaForCausalLM"})) {
    fail<UsageError>("{}: architectures {} are not supported; fedshard trains [\"LlamaForCausalLM\"]", config.source(),
                     architectures->dump());
  }
}

void refuse_other_computations(const Reader& config) {
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (config.boolean(key).value_or(false)) {
      fail<UsageError>("{}: {} is true; fedshard's Llama has no biases", config.source(), key);
    }
  }
  const std::string activation = config.text("hidden_act").value_or("silu");
  if (activation != "silu") {
    fail<UsageError>("{}: hidden_act '{}' is not supported; fedshard's Llama uses 'silu'", config.source(), activation);
  }
  const double dropout = config.number("attention_dropout").value_or(0.0);
  if (dropout != 0.0) fail<UsageError>("{}: attention_dropout is {}; only 0 is supported", config.source(), dropout);
}

struct Rope {
  std::optional<double> theta;
  std::optional<RopeScaling> scaling;
  bool operator==(const Rope&) const = default;
};

void refuse_partial_rotation(const Reader& object) {
  const double part = object.number("partial_rotary_factor").value_or(1.0);
  if (part != 1.0) {
    fail<UsageError>("{}: partial_rotary_factor is {}; only 1 is supported", object.source(), part);
  }
}

// `rope_parameters` or `rope_scaling`: the same keys, of which the older one has no rope_theta and may say `type`.
Rope read_rope(const Reader& rope, std::int64_t max_position_embeddings) {
  refuse_partial_rotation(rope);
  auto type = rope.text("rope_type");
  if (!type) type = rope.text("type");
  const std::string kind = type.value_or("default");
  Rope result;
  result.theta = rope.number("rope_theta");
  if (kind == "default") return result;
  if (kind != "llama3") {
    fail<UsageError>("{}: rope_type '{}' is not supported; fedshard knows 'default' and 'llama3'", rope.source(), kind);
  }
  RopeScaling scaling;
  scaling.factor = rope.required("factor", rope.number("factor"));
  scaling.low_freq_factor = rope.required("low_freq_factor", rope.number("low_freq_factor"));
  scaling.high_freq_factor = rope.required("high_freq_factor", rope.number("high_freq_factor"));
  scaling.original_max_position_embeddings =
      rope.integer("original_max_position_embeddings").value_or(max_position_embeddings);
  result.scaling = scaling;
  return result;
}

void read_rope_parameters(const Reader& config, Dims& dims) {
  refuse_partial_rotation(config);
  const auto newer = config.object("rope_parameters");
  const auto older = config.object("rope_scaling");
  Rope rope;
  if (newer) rope = read_rope(*newer, dims.max_position_embeddings);
  if (older) {
    const Rope other = read_rope(*older, dims.max_position_embeddings);
    if (newer && other.scaling != rope.scaling) {
      fail<UsageError>("{}: rope_parameters and rope_scaling contradict each other; remove one", config.source());
    }
    rope.scaling = other.scaling;
    if (other.theta) rope.theta = other.theta;
  }
  const auto theta = config.number("rope_theta");
  if (rope.theta && theta && *rope.theta != *theta) {
    fail<UsageError>("{}: rope_theta is {} at the top and {} in the rotary parameters; remove one", config.source(),
                     *theta, *rope.theta);
  }
  dims.rope_theta = rope.theta.value_or(theta.value_or(10000.0));
  dims.rope_scaling = rope.scaling;
}

}  // namespace

Dims parse_hf_config(std::string_view text, std::string_view source) {
  const auto check_depth = [&](int depth, json::parse_event_t, const json&) {
    if (depth > kMostNested) fail<DamagedError>("{}: is nested more than {} deep", source, kMostNested);
    return true;
  };
  const json parsed = json::parse(text, check_depth, /*allow_exceptions=*/false);
  if (!parsed.is_object()) fail<DamagedError>("{}: is not a JSON object", source);
  const Reader config(parsed, std::string(source));
  refuse_other_architectures(config);
  refuse_other_computations(config);
  const auto size = [&](const char* key) { return config.required(key, config.integer(key)); };
  Dims dims;
  dims.hidden_size = size("hidden_size");
  dims.intermediate_size = size("intermediate_size");
  dims.num_hidden_layers = size("num_hidden_layers");
  dims.num_attention_heads = size("num_attention_heads");
  dims.num_key_value_heads = config.integer("num_key_value_heads").value_or(dims.num_attention_heads);
  dims.head_dim = config.integer("head_dim").value_or(0);
  dims.vocab_size = size("vocab_size");
  dims.rms_norm_eps = config.number("rms_norm_eps").value_or(1e-6);
  dims.tie_word_embeddings = config.boolean("tie_word_embeddings").value_or(false);
  dims.max_position_embeddings = config.integer("max_position_embeddings").value_or(2048);
  dims.initializer_range = config.number("initializer_range").value_or(0.02);
  read_rope_parameters(config, dims);
  try {
    dims.validate();
  } catch (const UsageError& e) {
    fail<UsageError>("{}: {}", source, e.what());
  }
  return dims;
}

Dims read_hf_config(const std::filesystem::path& path) { return parse_hf_config(base::read_file(path), path.string()); }

}  // namespace fedshard::model
