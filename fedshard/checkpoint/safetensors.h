// The safetensors file format: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes.
//
// The reader maps the file and hands out views, so opening a 100 GB file costs its header and each rank touches only
// the pages of its own shard. It is as strict as the format's reference implementation: tensors must cover the data
// exactly, without overlap or hole, because a file that does not was cut, patched or written by something broken.
// Format: https://github.com/huggingface/safetensors (README, "Format").
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fedshard/base/file.h"

namespace fedshard::checkpoint {

// One tensor of a file. `dtype` is the format's name for it ("F32", "BF16", "F16", "I64", ...).
struct TensorEntry {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, little endian; a view that need not be aligned
  std::int64_t numel() const;
};

// Bytes of an element, or 0 where the format (or fedshard) knows no such dtype.
std::int64_t dtype_size(std::string_view dtype);

class SafetensorsFile {
 public:
  // Throws UsageError where the file can't be opened, DamagedError naming the file, the tensor and what is wrong.
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::map<std::string, TensorEntry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Throws DamagedError naming the file where it has no such tensor. The entry's bytes live as long as this object.
  const TensorEntry& at(const std::string& name) const;

 private:
  base::MappedFile file_;
  std::map<std::string, TensorEntry> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Writes a file atomically (beside its place, flushed, renamed), tensor by tensor, without a copy of the whole. Entries
// must have as many bytes as shape and dtype say. Throws RunError; nothing is left behind.
void write_safetensors(const std::filesystem::path& path, const std::map<std::string, TensorEntry>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace fedshard::checkpoint
