#include "fedshard/data/prepare.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "fedshard/base/error.h"
#include "fedshard/base/file.h"

namespace fedshard::data {
namespace {

constexpr std::int64_t kProgressBytes = 1 << 20;

struct FileState {
  std::int64_t size;
  std::int64_t modified_ns;
  bool operator==(const FileState&) const = default;
};

FileState state_of(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    base::fail<base::UsageError>("{}: cannot open: {}", path.string(), std::strerror(errno));
  }
  return {status.st_size, status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec};
}

std::ifstream open_input(const std::filesystem::path& path) {
  std::error_code ignored;  // what can't be examined can't be opened either
  if (std::filesystem::is_directory(path, ignored)) {
    base::fail<base::UsageError>("{}: is a folder; name the files in it, say {}/*.txt", path.string(), path.string());
  }
  std::ifstream input(path, std::ios::binary);
  if (!input) base::fail<base::UsageError>("{}: cannot open: {}", path.string(), std::strerror(errno));
  return input;
}

// Spares the processes of one machine from all doing the same work. It is not needed for safety, so file systems that
// cannot lock a folder are fine.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder)
      : fd_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    while (fd_ >= 0 && ::flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~FolderLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_;
};

// The name in the cache folder of what is made of `source` as it is now.
std::filesystem::path cached(const std::filesystem::path& cache, const std::filesystem::path& source,
                             const std::string& purpose, const std::string& extension) {
  const FileState state = state_of(source);
  const std::string key = fmt::format("{}\n{}\n{}\n{}\n{}", std::filesystem::absolute(source).string(), state.size,
                                      state.modified_ns, kTokenFileVersion, purpose);
  return cache / fmt::format("{}-{}{}", source.stem().string(), hash_hex(key), extension);
}

std::filesystem::path prepare_cached(const std::filesystem::path& source, const Tokenizer& tokenizer,
                                     const std::filesystem::path& cache, BadRecords policy,
                                     const PrepareCallback& progress) {
  const FileState before = state_of(source);
  // Under `skip` the same source may give another file, and none under `fail`.
  const char* const rule = policy == BadRecords::skip ? "skip" : "fail";
  const auto target = cached(cache, source, fmt::format("{} {}", tokenizer.fingerprint(), rule), ".tokens");
  if (std::filesystem::exists(target)) return target;
  prepare_token_file({source}, target, tokenizer, policy, progress);
  if (state_of(source) != before) {
    std::filesystem::remove(target);
    base::fail<base::RunError>("{}: was changed while it was being prepared; start again", source.string());
  }
  return target;
}

void verify_once(const std::filesystem::path& path, const std::filesystem::path& cache) {
  const auto marker = cached(cache, path, "verified", ".verified");
  if (std::filesystem::exists(marker)) return;
  TokenFile(path).verify();
  base::write_file_atomically(marker, "");
}

}  // namespace

TokenFileInfo prepare_token_file(const std::vector<std::filesystem::path>& inputs, const std::filesystem::path& output,
                                 const Tokenizer& tokenizer, BadRecords policy, const PrepareCallback& progress) {
  if (std::filesystem::exists(output) && !looks_like_token_file(output)) {
    base::fail<base::UsageError>("{}: exists and is not a token file; delete it or choose another output",
                                 output.string());
  }
  PrepareProgress done{.output = output};
  for (const auto& path : inputs) {
    open_input(path);
    kind_of_text(path);
    done.total_bytes += state_of(path).size;
  }
  TokenFileWriter writer(output, tokenizer);
  std::int64_t skipped = 0;
  std::int64_t reported = 0;
  std::string text;
  for (const auto& path : inputs) {
    std::ifstream input = open_input(path);
    const auto reader = read_documents(input, path.string(), kind_of_text(path), policy);
    const std::int64_t before = done.bytes;
    while (reader->next(text)) {
      const std::vector<std::int32_t> ids = tokenizer.encode(text);
      writer.add_document(ids);
      ++done.documents;
      done.tokens += static_cast<std::int64_t>(ids.size()) + 1;
      done.bytes = before + reader->bytes_read();
      if (progress && done.bytes - reported >= kProgressBytes) {
        reported = done.bytes;
        progress(done);
      }
    }
    skipped += reader->skipped();
    done.bytes = before + reader->bytes_read();
    if (progress) progress(done);
  }
  if (done.documents == 0) {
    base::fail<base::UsageError>("{}: nothing to write: {} input file{} without a document, {} record{} skipped",
                                 output.string(), inputs.size(), inputs.size() == 1 ? "" : "s", skipped,
                                 skipped == 1 ? "" : "s");
  }
  return writer.finish(skipped);
}

std::vector<std::filesystem::path> expand_globs(const std::vector<std::string>& patterns) {
  std::vector<std::filesystem::path> paths;
  for (const std::string& pattern : patterns) {
    std::error_code ignored;  // what can't be examined is taken for a pattern
    if (std::filesystem::exists(pattern, ignored)) {
      paths.emplace_back(pattern);
    } else {
      glob_t found{};
      const int rc = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
      const std::vector<std::string> matches(found.gl_pathv, found.gl_pathv + found.gl_pathc);
      ::globfree(&found);
      if (rc == GLOB_ABORTED) {
        base::fail<base::UsageError>("{}: a folder on the way cannot be read: {}", pattern, std::strerror(errno));
      }
      if (rc != 0 || matches.empty()) {
        base::fail<base::UsageError>("{}: no such file, and as a pattern it matches none", pattern);
      }
      const std::size_t first = paths.size();
      paths.insert(paths.end(), matches.begin(), matches.end());
      std::sort(paths.begin() + static_cast<std::ptrdiff_t>(first), paths.end());
    }
  }
  for (const auto& path : paths) open_input(path);
  return paths;
}

std::vector<std::filesystem::path> resolve_data(const std::vector<std::string>& patterns, const Tokenizer& tokenizer,
                                                const std::filesystem::path& cache, BadRecords policy,
                                                const PrepareCallback& progress) {
  const auto sources = expand_globs(patterns);
  std::error_code error;
  std::filesystem::create_directories(cache, error);
  if (error || ::access(cache.c_str(), W_OK) != 0) {
    base::fail<base::RunError>(
        "{}: the folder for prepared text and for marks of verified token files cannot be {}: {}; set XDG_CACHE_HOME "
        "to "
        "a folder that can be written",
        cache.string(), error ? "made" : "written", error ? error.message() : std::strerror(errno));
  }
  const FolderLock lock(cache);
  std::vector<std::filesystem::path> files;
  for (const auto& source : sources) {
    const auto path =
        looks_like_token_file(source) ? source : prepare_cached(source, tokenizer, cache, policy, progress);
    const TokenFile file(path);
    if (file.info().fingerprint != tokenizer.fingerprint()) {
      base::fail<base::UsageError>(
          "{}: was prepared with tokenizer {}, the configured one is {}; prepare it again or "
          "configure the tokenizer that made it",
          path.string(), file.info().fingerprint, tokenizer.fingerprint());
    }
    verify_once(path, cache);
    files.push_back(path);
  }
  return files;
}

}  // namespace fedshard::data
