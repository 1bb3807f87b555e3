#include "fedshard/plan/compression.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::plan {
namespace {

using Kind = Compression::Kind;

std::vector<std::int64_t> sizes() {
  std::vector<std::int64_t> all = {97,  127,  128,  129,  255,  256,  257,  511, 512,
                                   513, 1009, 4095, 4096, 4097, 8191, 8192, 8193};
  for (std::int64_t n = 0; n <= 70; ++n) all.push_back(n);
  return all;
}

// The bytes of a piece, block by block, by what a block holds.
template <class BlockBytes>
std::int64_t sum_of_blocks(std::int64_t numel, std::int64_t block, BlockBytes block_bytes) {
  std::int64_t bytes = 0;
  for (std::int64_t left = numel; left > 0; left -= block) bytes += block_bytes(std::min(left, block));
  return bytes;
}

TEST(Compression, WithoutBlocksBytesGoByTheElement) {
  for (const std::int64_t n : sizes()) {
    EXPECT_EQ(encoded_bytes({}, n), 4 * n);
    EXPECT_EQ(encoded_bytes({Kind::bf16, 0, 0}, n), 2 * n);
  }
}

TEST(Compression, NumbersTakeAByteOrHalfOneAndAScaleABlock) {
  for (const std::int64_t n : sizes()) {
    for (const std::int64_t block : {1, 2, 7, 64, 256}) {
      EXPECT_EQ(encoded_bytes({Kind::int8, block, 0}, n), sum_of_blocks(n, block, [](auto b) { return 4 + b; }));
      EXPECT_EQ(encoded_bytes({Kind::int4, block, 0}, n),
                sum_of_blocks(n, block, [](auto b) { return 4 + b / 2 + b % 2; }));
    }
  }
}

TEST(Compression, TopkTakesTwoLevelsAndPackedSlotsABlock) {
  EXPECT_EQ(encoded_bytes(usual_compression(Kind::topk), 4096), 8 + 64 * 14 / 8);
  EXPECT_EQ(encoded_bytes(usual_compression(Kind::topk), 4096 + 2048), 120 + 8 + 32 * 13 / 8);
  EXPECT_EQ(encoded_bytes(usual_compression(Kind::topk), 1), 8 + 1);  // an index of no bits, 2 bits of value
  EXPECT_EQ(encoded_bytes(usual_compression(Kind::topk), 0), 0);
  EXPECT_EQ(encoded_bytes({Kind::topk, 5, 3}, 5 + 2), (8 + 2) + (8 + 1));  // 3 slots of 5 bits, 2 slots of 3 bits
}

TEST(Compression, AShorterBlockKeepsAsLargeAShare) {
  const Compression usual = usual_compression(Kind::topk);
  EXPECT_EQ(kept_of(usual, 4096), 64);
  EXPECT_EQ(kept_of(usual, 4095), 64);
  EXPECT_EQ(kept_of(usual, 2048), 32);
  EXPECT_EQ(kept_of(usual, 65), 2);
  EXPECT_EQ(kept_of(usual, 64), 1);
  EXPECT_EQ(kept_of(usual, 1), 1);
  for (const std::int64_t block : {1, 2, 3, 31, 4096}) {
    for (std::int64_t top_k = 1; top_k <= block; top_k += 1 + top_k / 2) {
      const Compression compression{Kind::topk, block, top_k};
      EXPECT_EQ(kept_of(compression, block), top_k);
      for (std::int64_t n = 1; n < block; n += 1 + n / 9) {
        const std::int64_t kept = kept_of(compression, n);
        EXPECT_TRUE(kept >= 1 && kept <= n && kept <= top_k) << n << " of " << block << ", top_k " << top_k;
        EXPECT_GE(kept * block, top_k * n);
      }
    }
  }
}

TEST(Compression, AnIndexHasTheBitsThatItsBlockNeeds) {
  EXPECT_EQ(index_bits(1), 0);
  EXPECT_EQ(index_bits(2), 1);
  EXPECT_EQ(index_bits(3), 2);
  EXPECT_EQ(index_bits(4), 2);
  EXPECT_EQ(index_bits(5), 3);
  EXPECT_EQ(index_bits(4096), 12);
  EXPECT_EQ(index_bits(4097), 13);
}

TEST(Compression, CountsBeyond32Bits) {
  constexpr std::int64_t kNumel = (std::int64_t{1} << 33) + 1;
  EXPECT_EQ(encoded_bytes({}, kNumel), 4 * kNumel);
  EXPECT_EQ(encoded_bytes(usual_compression(Kind::int8), kNumel), (kNumel - 1) / 256 * 260 + 5);
  EXPECT_EQ(encoded_bytes(usual_compression(Kind::topk), kNumel), (kNumel - 1) / 4096 * 120 + 9);
}

TEST(Compression, RefusesBlocksThatCannotBe) {
  for (const Kind kind : {Kind::none, Kind::bf16, Kind::int8, Kind::int4, Kind::topk}) {
    EXPECT_NO_THROW(check_compression(usual_compression(kind)));
  }
  for (const std::int64_t block : {std::int64_t{-1}, std::int64_t{0}, (std::int64_t{1} << 24) + 1}) {
    EXPECT_THROW(check_compression({Kind::int8, block, 0}), base::UsageError);
    EXPECT_THROW(check_compression({Kind::int4, block, 0}), base::UsageError);
    EXPECT_THROW(check_compression({Kind::topk, block, 1}), base::UsageError);
    EXPECT_THROW(encoded_bytes({Kind::int8, block, 0}, 10), base::UsageError);
  }
  for (const std::int64_t top_k : {-1, 0, 9}) {
    EXPECT_THROW(check_compression({Kind::topk, 8, top_k}), base::UsageError);
  }
  EXPECT_NO_THROW(check_compression({Kind::topk, 8, 8}));
  EXPECT_THROW(encoded_bytes({}, -1), base::RunError);
}

}  // namespace
}  // namespace fedshard::plan
