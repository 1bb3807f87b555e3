#include "fedshard/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "fedshard/base/error.h"

namespace fedshard::base {
namespace {

// Closes the descriptor on every way out.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

void write_all(int fd, std::string_view content, const std::filesystem::path& path) {
  while (!content.empty()) {
    const ssize_t n = ::write(fd, content.data(), content.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail<RunError>("{}: cannot write: {}", path.string(), std::strerror(errno));
    content.remove_prefix(static_cast<std::size_t>(n));
  }
}

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

std::filesystem::path temporary_beside(const std::filesystem::path& path) {
  return path.parent_path() / fmt::format(".{}.{}.tmp", path.filename().string(), ::getpid());
}

void write_file_atomically(const std::filesystem::path& path, std::string_view content) {
  const auto temporary = temporary_beside(path);
  try {
    const Descriptor file{::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (file.fd < 0) fail<RunError>("{}: cannot create: {}", temporary.string(), std::strerror(errno));
    write_all(file.fd, content, temporary);
    if (::fsync(file.fd) != 0) fail<RunError>("{}: cannot flush: {}", temporary.string(), std::strerror(errno));
    std::filesystem::rename(temporary, path);
  } catch (const std::filesystem::filesystem_error& e) {
    ::unlink(temporary.c_str());
    fail<RunError>("{}: cannot replace: {}", path.string(), e.code().message());
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

void flush_to_disk(const std::filesystem::path& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0 || ::fsync(file.fd) != 0) fail<RunError>("{}: cannot flush: {}", path.string(), std::strerror(errno));
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) fail<UsageError>("{}: cannot open: {}", path.string(), std::strerror(errno));
  struct stat status {};
  if (::fstat(file.fd, &status) != 0) fail<UsageError>("{}: cannot stat: {}", path.string(), std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail<UsageError>("{}: is not a regular file", path.string());
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  if (data == MAP_FAILED) fail<UsageError>("{}: cannot map: {}", path.string(), std::strerror(errno));
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace fedshard::base
