// How a piece of the pseudo-gradient is compressed, and the exact bytes that it takes on the wire. Torch-free, so that
// traffic forecasts know them before any rank starts; federation/compress.h does the encoding.
//
// A surprise: there is no header. Both ends know the compression and the number of elements, so the bytes of a piece
// are a function of these two, and a message of another length is damaged.
#pragma once
#include <cstdint>

namespace fedshard::plan {

struct Compression {
  // none: fp32. bf16: 2 bytes an element. int8, int4: blocks of whole numbers with one scale. topk: the largest of each
  // block, as 2 bits and an index (SparseLoCo, arXiv 2508.15706).
  enum class Kind { none, bf16, int8, int4, topk };

  Kind kind = Kind::none;
  std::int64_t block = 0;  // elements that share a scale (int8, int4, topk); the last block of a piece may be shorter
  std::int64_t top_k = 0;  // elements of a whole block that are sent (topk)
  bool operator==(const Compression&) const = default;
};

// int8, int4: blocks of 256. topk: 64 of 4096, the paper's 1.56 %.
Compression usual_compression(Compression::Kind kind);

// Whether elements share scales in blocks (int8, int4, topk).
bool has_blocks(Compression::Kind kind);

// Throws UsageError unless block is from 1 to 2^24 (int8, int4, topk) and top_k from 1 to block (topk).
void check_compression(const Compression& compression);

// Elements that topk sends of a block of `numel` elements, where numel is at most block: ceil(top_k numel / block), so
// a shorter block keeps as large a share, and at least 1.
std::int64_t kept_of(const Compression& compression, std::int64_t numel);

// Bits of an index into a block of `numel` elements: what numel - 1 needs; 12 for 4096, 0 for 1.
int index_bits(std::int64_t numel);

// Bytes of a contiguous piece of `numel` elements, at least 0. With n the size of each of its blocks, k = kept_of(n):
//   none 4 numel    bf16 2 numel    int8 sum of (4 + n)    int4 sum of (4 + ceil(n / 2))
//   topk sum of (8 + ceil(k (2 + index_bits(n)) / 8))
std::int64_t encoded_bytes(const Compression& compression, std::int64_t numel);

}  // namespace fedshard::plan
