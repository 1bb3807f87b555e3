#include "fedshard/checkpoint/hf.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "fedshard/base/error.h"
#include "fedshard/model/names.h"

namespace fedshard::checkpoint {

using base::DamagedError;
using base::fail;
using base::UsageError;
using nlohmann::json;

namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

using WeightMap = std::map<std::string, std::string>;  // tensor -> file name

WeightMap read_index(const std::filesystem::path& path) {
  const json index = json::parse(base::read_file(path), nullptr, /*allow_exceptions=*/false);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    fail<DamagedError>("{}: has no 'weight_map' object", path.string());
  }
  WeightMap files;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    // A plain name: an index must not lead out of its folder.
    if (!file.is_string() || std::filesystem::path(file.get<std::string>()).filename() != file.get<std::string>()) {
      fail<DamagedError>("{}: tensor '{}' is in {}, which is no file name", path.string(), tensor, file.dump());
    }
    files[tensor] = file.get<std::string>();
  }
  return files;
}

// Opens the shards; each must have the tensors that the index places there and no others.
std::vector<SafetensorsFile> open_shards(const std::filesystem::path& folder) {
  const WeightMap places = read_index(folder / kIndexFile);
  std::set<std::string> names;
  for (const auto& [tensor, file] : places) names.insert(file);
  std::vector<SafetensorsFile> files;
  for (const std::string& name : names) {
    const SafetensorsFile& file = files.emplace_back(folder / name);
    for (const auto& [tensor, entry] : file.tensors()) {
      const auto place = places.find(tensor);
      if (place == places.end() || place->second != name) {
        fail<DamagedError>("{}: has tensor '{}', which {} does not place there", file.path().string(), tensor,
                           kIndexFile);
      }
    }
    for (const auto& [tensor, place] : places) {
      if (place == name) file.at(tensor);
    }
  }
  return files;
}

std::vector<SafetensorsFile> open_folder(const std::filesystem::path& folder) {
  if (std::filesystem::exists(folder / kSingleFile)) {
    std::vector<SafetensorsFile> files;
    files.emplace_back(folder / kSingleFile);
    return files;
  }
  if (std::filesystem::exists(folder / kIndexFile)) return open_shards(folder);
  fail<UsageError>("{}: has neither {} nor {}", folder.string(), kSingleFile, kIndexFile);
}

float widen(float value) { return value; }
float widen(c10::BFloat16 value) { return static_cast<float>(value); }
float widen(c10::Half value) { return static_cast<float>(value); }

// Mapped bytes need not be aligned for T, hence the copies.
template <class T>
void convert(std::span<const std::byte> bytes, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    out[i] = widen(value);
  }
}

bool is_readable(const TensorEntry& entry) {
  return entry.dtype == "F32" || entry.dtype == "BF16" || entry.dtype == "F16";
}

// Elements [begin, begin + out.size()) of a tensor for which is_readable() holds.
void read_elements(const TensorEntry& entry, std::int64_t begin, std::span<float> out) {
  const auto bytes = entry.bytes.subspan(begin * dtype_size(entry.dtype));
  if (entry.dtype == "F32") {
    convert<float>(bytes, out);
  } else if (entry.dtype == "BF16") {
    convert<c10::BFloat16>(bytes, out);
  } else {
    convert<c10::Half>(bytes, out);
  }
}

void check_parameter(const plan::ParameterSpec& parameter, const TensorEntry& entry, const std::string& path) {
  if (entry.shape != parameter.shape) {
    fail<DamagedError>("{}: tensor '{}' has shape {}, but the model's config says {}", path, parameter.name,
                       entry.shape, parameter.shape);
  }
  if (!is_readable(entry)) {
    fail<DamagedError>("{}: tensor '{}' is {}; weights must be F32, BF16 or F16", path, parameter.name, entry.dtype);
  }
}

bool equal_values(const TensorEntry& a, const TensorEntry& b) {
  constexpr std::int64_t kChunk = 1 << 16;
  std::vector<float> left(kChunk);
  std::vector<float> right(kChunk);
  for (std::int64_t begin = 0; begin < a.numel(); begin += kChunk) {
    const std::size_t size = static_cast<std::size_t>(std::min(kChunk, a.numel() - begin));
    read_elements(a, begin, std::span(left).first(size));
    read_elements(b, begin, std::span(right).first(size));
    if (std::memcmp(left.data(), right.data(), size * sizeof(float)) != 0) return false;
  }
  return true;
}

// A tensor with its file, for messages.
struct Found {
  const TensorEntry* entry;
  std::string path;
};

// A tied model's files may carry the embedding a second time; the plan has no lm_head then.
void check_tied_head(const std::map<std::string, Found>& found, const Found& head) {
  const auto table = found.find(std::string(model::kEmbedTokens));
  if (table == found.end() || table->second.entry->shape != head.entry->shape || !is_readable(*head.entry) ||
      !equal_values(*table->second.entry, *head.entry)) {
    fail<DamagedError>("{}: '{}' differs from '{}', but the model's config ties them; set tie_word_embeddings to false",
                       head.path, model::kLmHead, model::kEmbedTokens);
  }
}

}  // namespace

HfWeights::HfWeights(const std::filesystem::path& folder, const plan::ModelPlan& plan) : files_(open_folder(folder)) {
  std::map<std::string, Found> found;
  for (const SafetensorsFile& file : files_) {
    for (const auto& [name, entry] : file.tensors()) found[name] = {&entry, file.path().string()};
  }
  std::set<std::string> expected;
  for (const plan::UnitSpec& unit : plan.units) {
    units_.emplace_back();
    for (const plan::ParameterSpec& parameter : unit.parameters) {
      const auto place = found.find(parameter.name);
      if (place == found.end()) {
        fail<DamagedError>("{}: the weights have no tensor '{}', which the model needs", folder.string(),
                           parameter.name);
      }
      check_parameter(parameter, *place->second.entry, place->second.path);
      units_.back().push_back(place->second.entry);
      expected.insert(parameter.name);
    }
  }
  for (const auto& [name, place] : found) {
    if (expected.count(name) != 0 || model::is_rotary_buffer(name)) continue;
    if (name == model::kLmHead && expected.count(std::string(model::kEmbedTokens)) != 0) {
      check_tied_head(found, place);
      continue;
    }
    fail<DamagedError>("{}: tensor '{}' belongs to no parameter of the model that the config describes", place.path,
                       name);
  }
}

void HfWeights::read_slice(int unit, std::int64_t begin, std::int64_t end, std::span<float> out) const {
  base::require(unit >= 0 && unit < std::ssize(units_), "unit {} of {}", unit, units_.size());
  base::require(0 <= begin && begin <= end && std::ssize(out) == end - begin, "slice [{}, {}) into {} values", begin,
                end, out.size());
  std::int64_t start = 0;
  for (const TensorEntry* entry : units_[unit]) {
    const std::int64_t from = std::max(begin, start);
    const std::int64_t to = std::min(end, start + entry->numel());
    if (from < to) read_elements(*entry, from - start, out.subspan(from - begin, to - from));
    start += entry->numel();
  }
  base::require(end <= start, "slice [{}, {}) of unit {} with {} elements", begin, end, unit, start);
}

}  // namespace fedshard::checkpoint
