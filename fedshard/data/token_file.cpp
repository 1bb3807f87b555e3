#include "fedshard/data/token_file.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::data {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are mapped as they are: little-endian only");

constexpr std::size_t kHeaderBytes = 4096;
constexpr std::array<char, 8> kMagic{'F', 'E', 'D', 'S', 'H', 'T', 'O', 'K'};
constexpr std::uint32_t kByteOrder = 0x01020304;
constexpr std::uint32_t kForeignByteOrder = 0x04030201;
constexpr std::size_t kBufferedIds = 1 << 18;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 60;  // more than any file holds; their bytes fit 64 bits

struct Header {
  std::array<char, 8> magic;
  std::uint32_t byte_order;
  std::uint32_t version;
  std::int64_t tokens;
  std::int64_t documents;
  std::int64_t skipped;
  std::int64_t vocab_size;
  std::int64_t end_of_text;
  std::int64_t max_id;
  std::array<char, 16> fingerprint;
  std::uint64_t payload_hash;
  std::uint64_t header_hash;
};
static_assert(sizeof(Header) == 96 && offsetof(Header, header_hash) == 88);

std::uint64_t hash_of(const Header& header) { return XXH64(&header, offsetof(Header, header_hash), 0); }

Header read_header(const base::MappedFile& file) {
  const std::string name = file.path().string();
  const std::span<const std::byte> bytes = file.bytes();
  Header header{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), sizeof(header)), reinterpret_cast<std::byte*>(&header));
  if (header.magic != kMagic) {
    base::fail<base::UsageError>("{}: is not a token file; make one with `fedshard data prepare`", name);
  }
  if (bytes.size() < kHeaderBytes) {
    base::fail<base::DamagedError>(
        "{}: is truncated: {} bytes, less than its header of {}; delete it and prepare it again", name, bytes.size(),
        kHeaderBytes);
  }
  if (header.byte_order == kForeignByteOrder) {
    base::fail<base::DamagedError>("{}: was written on a big-endian machine; delete it and prepare it on this one",
                                   name);
  }
  if (header.byte_order == kByteOrder && header.version != kTokenFileVersion) {
    base::fail<base::DamagedError>(
        "{}: has format version {}, this fedshard reads version {}; delete it and prepare it again", name,
        header.version, kTokenFileVersion);
  }
  if (header.byte_order != kByteOrder || header.header_hash != hash_of(header)) {
    base::fail<base::DamagedError>("{}: its header is damaged (bytes 8 to 96); delete it and prepare it again", name);
  }
  if (header.tokens < 0 || header.tokens > kMostTokens) {
    base::fail<base::DamagedError>("{}: its header counts {} tokens; delete it and prepare it again", name,
                                   header.tokens);
  }
  const std::uint64_t expected = kHeaderBytes + 4 * static_cast<std::uint64_t>(header.tokens);
  if (bytes.size() != expected) {
    base::fail<base::DamagedError>("{}: {}: {} tokens need {} bytes, it has {}; delete it and prepare it again", name,
                                   bytes.size() < expected ? "is truncated" : "has grown", header.tokens, expected,
                                   bytes.size());
  }
  return header;
}

}  // namespace

bool looks_like_token_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) base::fail<base::UsageError>("{}: cannot open: {}", path.string(), std::strerror(errno));
  std::array<char, 8> magic{};
  file.read(magic.data(), magic.size());
  return magic == kMagic;
}

TokenFile::TokenFile(const std::filesystem::path& path) : file_(path) {
  const Header header = read_header(file_);
  info_ = {header.tokens,
           header.documents,
           header.skipped,
           header.vocab_size,
           header.end_of_text,
           header.max_id,
           std::string(header.fingerprint.data(), header.fingerprint.size()),
           header.payload_hash};
}

std::span<const std::int32_t> TokenFile::tokens() const {
  return {reinterpret_cast<const std::int32_t*>(file_.bytes().data() + kHeaderBytes),
          static_cast<std::size_t>(info_.tokens)};
}

void TokenFile::verify() const {
  const std::uint64_t hash = XXH64(tokens().data(), tokens().size_bytes(), 0);
  if (hash != info_.payload_hash) {
    base::fail<base::DamagedError>(
        "{}: its ids are damaged: their checksum is {:016x}, the header says {:016x}; "
        "delete it and prepare it again",
        path().string(), hash, info_.payload_hash);
  }
}

struct TokenFileWriter::State {
  std::filesystem::path path;
  std::filesystem::path temporary;
  int fd = -1;
  XXH64_state_t* hash = nullptr;
  TokenFileInfo info;
  std::vector<std::int32_t> buffer;

  ~State() {
    XXH64_freeState(hash);
    if (fd >= 0) ::close(fd);
    if (!temporary.empty()) ::unlink(temporary.c_str());
  }

  [[noreturn]] void fail_to(const char* what) const {
    base::fail<base::RunError>("{}: cannot {}: {}", temporary.string(), what, std::strerror(errno));
  }

  void create() {
    // Beside other processes, other threads of this one may prepare the same file.
    for (int attempt = 0; fd < 0; ++attempt) {
      temporary = base::temporary_beside(path);
      temporary += fmt::format(".{}", attempt);
      fd = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd >= 0 || errno == EEXIST) continue;
      const int reason = errno;
      const std::filesystem::path wanted = std::exchange(temporary, {});
      base::fail<base::RunError>("{}: cannot create: {}", wanted.string(), std::strerror(reason));
    }
  }

  void write(const void* data, std::size_t size, std::size_t offset) {
    const char* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t n = ::pwrite(fd, bytes, size, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_to("write");
      bytes += n;
      offset += static_cast<std::size_t>(n);
      size -= static_cast<std::size_t>(n);
    }
  }

  void flush() {
    const std::size_t size = buffer.size() * sizeof(std::int32_t);
    write(buffer.data(), size, kHeaderBytes + 4 * static_cast<std::size_t>(info.tokens));
    XXH64_update(hash, buffer.data(), size);
    info.tokens += static_cast<std::int64_t>(buffer.size());
    for (const std::int32_t id : buffer) info.max_id = std::max<std::int64_t>(info.max_id, id);
    buffer.clear();
  }
};

TokenFileWriter::TokenFileWriter(const std::filesystem::path& path, const Tokenizer& tokenizer)
    : state_(std::make_unique<State>()) {
  state_->path = path;
  state_->info.vocab_size = tokenizer.vocab_size();
  state_->info.end_of_text = tokenizer.end_of_text();
  state_->info.fingerprint = tokenizer.fingerprint();
  base::require(state_->info.fingerprint.size() == 16, "the fingerprint {} has not 16 digits",
                state_->info.fingerprint);
  state_->hash = XXH64_createState();
  base::require(state_->hash != nullptr, "no memory for a checksum");
  XXH64_reset(state_->hash, 0);
  state_->create();
}

TokenFileWriter::~TokenFileWriter() = default;

void TokenFileWriter::add_document(std::span<const std::int32_t> ids) {
  std::vector<std::int32_t>& buffer = state_->buffer;
  buffer.insert(buffer.end(), ids.begin(), ids.end());
  buffer.push_back(static_cast<std::int32_t>(state_->info.end_of_text));
  ++state_->info.documents;
  if (buffer.size() >= kBufferedIds) state_->flush();
}

TokenFileInfo TokenFileWriter::finish(std::int64_t skipped) {
  State& s = *state_;
  s.flush();
  s.info.skipped = skipped;
  s.info.payload_hash = XXH64_digest(s.hash);
  Header header{kMagic,           kByteOrder, kTokenFileVersion,   s.info.tokens,
                s.info.documents, skipped,    s.info.vocab_size,   s.info.end_of_text,
                s.info.max_id,    {},         s.info.payload_hash, 0};
  std::copy(s.info.fingerprint.begin(), s.info.fingerprint.end(), header.fingerprint.begin());
  header.header_hash = hash_of(header);
  std::array<char, kHeaderBytes> block{};
  std::memcpy(block.data(), &header, sizeof(header));
  s.write(block.data(), block.size(), 0);
  if (::fsync(s.fd) != 0) s.fail_to("flush");
  if (::rename(s.temporary.c_str(), s.path.c_str()) != 0) {
    base::fail<base::RunError>("{}: cannot replace: {}", s.path.string(), std::strerror(errno));
  }
  s.temporary.clear();
  const TokenFileInfo info = s.info;
  state_.reset();
  return info;
}

}  // namespace fedshard::data
