#include "fedshard/checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::checkpoint {

using base::DamagedError;
using base::fail;
using base::RunError;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors files are little endian");

namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kLargestHeader = 100'000'000;  // the reference implementation's limit
constexpr const char* kMetadataKey = "__metadata__";

// The header's text. The mapped file is at least as long as what is returned says.
std::string_view header_text(std::span<const std::byte> bytes, const std::string& path) {
  if (bytes.size() < kLengthBytes) {
    fail<DamagedError>("{}: {} bytes are too few for a safetensors file", path, bytes.size());
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kLargestHeader) {
    fail<DamagedError>("{}: a header of {} bytes is beyond the format's limit of {}; this is no safetensors file", path,
                       length, kLargestHeader);
  }
  if (length > bytes.size() - kLengthBytes) {
    fail<DamagedError>("{}: cut short: the header has {} bytes, the file only {}", path, length, bytes.size());
  }
  return {reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, static_cast<std::size_t>(length)};
}

// The JSON library keeps the last of two equal keys without a word; the callback catches them.
json parse_header(std::string_view text, const std::string& path) {
  std::vector<std::set<std::string>> keys;
  const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      fail<DamagedError>("{}: the header has {} '{}' twice", path, depth == 1 ? "tensor" : "key",
                         value.get<std::string>());
    }
    return true;
  };
  json header;
  try {
    header = json::parse(text, check);
  } catch (const json::exception& e) {
    fail<DamagedError>("{}: the header is no JSON: {}", path, e.what());
  }
  if (!header.is_object()) fail<DamagedError>("{}: the header is no JSON object", path);
  return header;
}

// A list of non-negative 64-bit integers, or nothing.
std::optional<std::vector<std::int64_t>> integers(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array()) return std::nullopt;
  std::vector<std::int64_t> values;
  for (const json& value : *found) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX) return std::nullopt;
    values.push_back(value.get<std::int64_t>());
  }
  return values;
}

// The bytes that a shape needs, or nothing where they overflow.
std::optional<std::int64_t> bytes_of(const std::vector<std::int64_t>& shape, std::int64_t element_size) {
  std::int64_t size = element_size;
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(size, extent, &size)) return std::nullopt;
  }
  return size;
}

// `where` names file and tensor.
TensorEntry read_entry(const json& value, std::span<const std::byte> data, const std::string& where) {
  if (!value.is_object()) fail<DamagedError>("{}: its header entry is no object", where);
  TensorEntry entry;
  const auto dtype = value.find("dtype");
  if (dtype == value.end() || !dtype->is_string()) fail<DamagedError>("{}: has no dtype", where);
  entry.dtype = dtype->get<std::string>();
  if (dtype_size(entry.dtype) == 0) fail<DamagedError>("{}: unknown dtype '{}'", where, entry.dtype);
  const auto shape = integers(value, "shape");
  if (!shape) fail<DamagedError>("{}: its shape is no list of sizes", where);
  entry.shape = *shape;
  const auto offsets = integers(value, "data_offsets");
  if (!offsets || offsets->size() != 2) fail<DamagedError>("{}: its data_offsets are no two offsets", where);
  const std::int64_t begin = (*offsets)[0];
  const std::int64_t end = (*offsets)[1];
  if (begin > end || end > std::ssize(data)) {
    fail<DamagedError>("{}: bytes [{}, {}) lie outside the file's {} bytes of data; the file may be cut short", where,
                       begin, end, data.size());
  }
  const auto size = bytes_of(entry.shape, dtype_size(entry.dtype));
  if (!size || *size != end - begin) {
    fail<DamagedError>("{}: has {} bytes, but its shape needs {}", where, end - begin,
                       size ? std::to_string(*size) : "more than 64 bits can count");
  }
  entry.bytes = data.subspan(begin, end - begin);
  return entry;
}

std::map<std::string, std::string> read_metadata(const json& value, const std::string& path) {
  const bool strings =
      value.is_object() && std::all_of(value.begin(), value.end(), [](const json& v) { return v.is_string(); });
  if (!strings) fail<DamagedError>("{}: {} is no map of strings", path, kMetadataKey);
  return value.get<std::map<std::string, std::string>>();
}

// In order of their bytes, each tensor starts where the one before it ends, and the last ends with the file.
void check_cover(const std::map<std::string, TensorEntry>& tensors, std::span<const std::byte> data,
                 const std::string& path) {
  std::vector<std::pair<std::span<const std::byte>, const std::string*>> parts;
  for (const auto& [name, entry] : tensors) parts.emplace_back(entry.bytes, &name);
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.data(), a.first.size()) < std::pair(b.first.data(), b.first.size());
  });
  const std::byte* next = data.data();
  for (const auto& [bytes, name] : parts) {
    if (bytes.data() < next) fail<DamagedError>("{}: tensor '{}' overlaps the one before it", path, *name);
    if (bytes.data() > next) {
      fail<DamagedError>("{}: {} bytes before tensor '{}' belong to no tensor", path, bytes.data() - next, *name);
    }
    next = bytes.data() + bytes.size();
  }
  const std::ptrdiff_t rest = data.data() + data.size() - next;
  if (rest != 0) fail<DamagedError>("{}: the last {} bytes belong to no tensor", path, rest);
}

std::string make_header(const std::map<std::string, TensorEntry>& tensors,
                        const std::map<std::string, std::string>& metadata, const std::string& path) {
  json header = json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  std::int64_t offset = 0;
  for (const auto& [name, entry] : tensors) {
    const auto size = bytes_of(entry.shape, dtype_size(entry.dtype));
    base::require(size && *size == std::ssize(entry.bytes) && dtype_size(entry.dtype) > 0 && name != kMetadataKey,
                  "{}: tensor '{}' of dtype {} has {} bytes", path, name, entry.dtype, entry.bytes.size());
    header[name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {offset, offset + std::ssize(entry.bytes)}}};
    offset += std::ssize(entry.bytes);
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // so that the data begin at a multiple of 8
  return text;
}

}  // namespace

std::int64_t TensorEntry::numel() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t dtype_size(std::string_view dtype) {
  static const std::map<std::string_view, std::int64_t> sizes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
      {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
      {"F32", 4},  {"I64", 8}, {"U64", 8}, {"F64", 8},     {"C64", 8}};
  const auto found = sizes.find(dtype);
  return found == sizes.end() ? 0 : found->second;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path) {
  const std::string name = path.string();
  const std::string_view text = header_text(file_.bytes(), name);
  const auto data = file_.bytes().subspan(kLengthBytes + text.size());
  const json header = parse_header(text, name);
  for (const auto& [key, value] : header.items()) {
    if (key == kMetadataKey) {
      metadata_ = read_metadata(value, name);
    } else {
      tensors_.emplace(key, read_entry(value, data, fmt::format("{}: tensor '{}'", name, key)));
    }
  }
  check_cover(tensors_, data, name);
}

const TensorEntry& SafetensorsFile::at(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) fail<DamagedError>("{}: has no tensor '{}'", path().string(), name);
  return found->second;
}

void write_safetensors(const std::filesystem::path& path, const std::map<std::string, TensorEntry>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string header = make_header(tensors, metadata, path.string());
  const std::uint64_t length = header.size();
  const auto temporary = base::temporary_beside(path);
  try {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    if (!file) fail<RunError>("{}: cannot create: {}", temporary.string(), std::strerror(errno));
    file.write(reinterpret_cast<const char*>(&length), kLengthBytes);
    file.write(header.data(), std::ssize(header));
    for (const auto& [name, entry] : tensors) {
      file.write(reinterpret_cast<const char*>(entry.bytes.data()), std::ssize(entry.bytes));
    }
    file.close();
    if (!file) fail<RunError>("{}: cannot write: {}", temporary.string(), std::strerror(errno));
    base::flush_to_disk(temporary);
    std::filesystem::rename(temporary, path);
  } catch (const std::filesystem::filesystem_error& e) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    fail<RunError>("{}: cannot replace: {}", path.string(), e.code().message());
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
}

}  // namespace fedshard::checkpoint
