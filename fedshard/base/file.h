// Files: read whole, written atomically, or mapped. Every error names the path and the system's reason.
#pragma once
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace fedshard::base {

// The whole file. Throws UsageError where it can't be opened.
std::string read_file(const std::filesystem::path& path);

// Writes `content` to a temporary file beside `path`, flushes it to disk and renames it over `path`: a reader sees the
// old content or the new, never a part. Throws RunError; the temporary file is gone afterwards either way.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);

// A name beside `path` that no other process uses, for a file that is to be renamed to `path` when it is whole.
std::filesystem::path temporary_beside(const std::filesystem::path& path);

// Flushes a file (or folder) to disk. Throws RunError.
void flush_to_disk(const std::filesystem::path& path);

// A file mapped read-only for as long as the object lives. Movable. An empty file maps to an empty span.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);  // throws UsageError where it can't be opened
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace fedshard::base
