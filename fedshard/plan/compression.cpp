#include "fedshard/plan/compression.h"

#include <bit>

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

using Kind = Compression::Kind;

constexpr std::int64_t kLargestBlock = std::int64_t{1} << 24;  // top_k times block fits easily, an index in 32 bits
constexpr std::int64_t kScaleBytes = 4, kCodeBits = 2;

std::int64_t bytes_of_bits(std::int64_t bits) { return (bits + 7) / 8; }

std::int64_t block_bytes(const Compression& compression, std::int64_t numel) {
  if (numel == 0) return 0;
  if (compression.kind == Kind::int8) return kScaleBytes + numel;
  if (compression.kind == Kind::int4) return kScaleBytes + bytes_of_bits(4 * numel);
  return 2 * kScaleBytes + bytes_of_bits(kept_of(compression, numel) * (kCodeBits + index_bits(numel)));
}

}  // namespace

Compression usual_compression(Kind kind) {
  if (kind == Kind::int8 || kind == Kind::int4) return {kind, 256, 0};
  if (kind == Kind::topk) return {kind, 4096, 64};
  return {kind, 0, 0};
}

bool has_blocks(Kind kind) { return kind != Kind::none && kind != Kind::bf16; }

void check_compression(const Compression& compression) {
  if (!has_blocks(compression.kind)) return;
  if (compression.block < 1 || compression.block > kLargestBlock) {
    base::fail<base::UsageError>("a block of compression has from 1 to {} elements, not {}", kLargestBlock,
                                 compression.block);
  }
  if (compression.kind == Kind::topk && (compression.top_k < 1 || compression.top_k > compression.block)) {
    base::fail<base::UsageError>("top_k is {}, but must be from 1 to the {} elements of a block", compression.top_k,
                                 compression.block);
  }
}

std::int64_t kept_of(const Compression& compression, std::int64_t numel) {
  return (compression.top_k * numel + compression.block - 1) / compression.block;
}

int index_bits(std::int64_t numel) { return std::bit_width(static_cast<std::uint64_t>(numel - 1)); }

std::int64_t encoded_bytes(const Compression& compression, std::int64_t numel) {
  base::require(numel >= 0, "a piece of {} elements", numel);
  if (compression.kind == Kind::none) return 4 * numel;
  if (compression.kind == Kind::bf16) return 2 * numel;
  check_compression(compression);
  return numel / compression.block * block_bytes(compression, compression.block) +
         block_bytes(compression, numel % compression.block);
}

}  // namespace fedshard::plan
