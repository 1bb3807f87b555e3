#include "fedshard/federation/compress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::federation {
namespace {

using plan::Compression;
using Kind = Compression::Kind;
using Values = std::vector<float>;
using Bytes = std::vector<std::uint8_t>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinite = std::numeric_limits<float>::infinity();

const std::vector<Compression> kAll = {
    {Kind::none, 0, 0},   {Kind::bf16, 0, 0}, {Kind::int8, 256, 0},  {Kind::int8, 7, 0},  {Kind::int8, 1, 0},
    {Kind::int4, 256, 0}, {Kind::int4, 7, 0}, {Kind::int4, 1, 0},    {Kind::topk, 64, 5}, {Kind::topk, 31, 31},
    {Kind::topk, 1, 1},   {Kind::topk, 6, 2}, {Kind::topk, 4096, 64}};
const std::vector<std::size_t> kSizes = {0,  1,  2,  3,  5,   6,   7,   8,   13,   30,   31,   32,
                                         63, 64, 65, 97, 127, 255, 256, 257, 1009, 4095, 4096, 4097};

Bytes encoded(const Compression& compression, const Values& values) {
  // Filled, so that a byte that encode leaves as it was shows.
  static std::uint8_t filling = 0;
  Bytes bytes(static_cast<std::size_t>(plan::encoded_bytes(compression, static_cast<std::int64_t>(values.size()))),
              filling += 85);
  encode(compression, values, bytes);
  return bytes;
}

Values decoded(const Compression& compression, const Bytes& bytes, std::size_t numel) {
  Values values(numel, 99);
  decode(compression, bytes, values);
  return values;
}

Values round_trip(const Compression& compression, const Values& values) {
  return decoded(compression, encoded(compression, values), values.size());
}

bool same_bits(const Values& a, const Values& b) {
  const auto same = [](float x, float y) { return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y); };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

// As pseudo-gradients are: most small, some much larger, some 0.
Values random_values(std::size_t numel, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1e-3F);
  Values values(numel);
  for (float& v : values) {
    const unsigned kind = random() % 16;
    v = kind == 0 ? 0 : kind == 1 ? 30 * normal(random) : normal(random);
  }
  return values;
}

std::size_t block_of(const Compression& compression, std::size_t numel) {
  const bool blocks = compression.kind != Kind::none && compression.kind != Kind::bf16;
  return blocks ? static_cast<std::size_t>(compression.block) : std::max<std::size_t>(numel, 1);
}

Values part_of(const Values& values, std::size_t begin, std::size_t size) {
  const auto from = values.begin() + static_cast<std::ptrdiff_t>(begin);
  return {from, from + static_cast<std::ptrdiff_t>(std::min(size, values.size() - begin))};
}

float largest_of(const Values& values) {
  float largest = 0;
  for (const float v : values) largest = std::max(largest, std::abs(v));
  return largest;
}

TEST(Compress, NoneKeepsEveryBit) {
  const Values values = {0.0F, -0.0F, 1e-45F, -3.5F, kInfinite, std::bit_cast<float>(0x7fc12345U)};
  EXPECT_TRUE(same_bits(round_trip({}, values), values));
}

TEST(Compress, Bf16RoundsToTheNearestTiesToEven) {
  const Values in = {1, 1 + 0x1p-8F, 1 + 3 * 0x1p-8F, 1 + 0x1p-8F + 0x1p-20F, -1 - 0x1p-8F - 0x1p-20F, 0x1p-133F};
  const Values out = {1, 1, 1 + 4 * 0x1p-8F, 1 + 0x1p-7F, -1 - 0x1p-7F, 0x1p-133F};
  EXPECT_TRUE(same_bits(round_trip({Kind::bf16, 0, 0}, in), out));
  const Values special = round_trip({Kind::bf16, 0, 0}, {kInfinite, -kInfinite, kNan});
  EXPECT_TRUE(special[0] == kInfinite && special[1] == -kInfinite && std::isnan(special[2]));
}

TEST(Compress, NumbersAsWorkedByHand) {
  // The largest magnitude, 127, makes the scale 1; 0.5 and 1.5 and 2.5 are ties.
  const Values in = {127, 0.5F, 1.5F, 2.5F, -1.5F, -126.6F, 0, 3};
  EXPECT_EQ(round_trip({Kind::int8, 8, 0}, in), (Values{127, 0, 2, 2, -2, -127, 0, 3}));
  EXPECT_EQ(encoded({Kind::int8, 8, 0}, in), (Bytes{0, 0, 0x80, 0x3f, 127, 0, 2, 2, 0xfe, 0x81, 0, 3}));
  const Values in4 = {-7, 0.5F, 1.5F, 6.4F, -3};
  EXPECT_EQ(round_trip({Kind::int4, 8, 0}, in4), (Values{-7, 0, 2, 6, -3}));
  EXPECT_EQ(encoded({Kind::int4, 8, 0}, in4), (Bytes{0, 0, 0x80, 0x3f, 0x09, 0x62, 0x0d}));
}

TEST(Compress, NumbersAreWithinHalfAStep) {
  for (const Compression& compression : kAll) {
    if (compression.kind != Kind::int8 && compression.kind != Kind::int4) continue;
    const double steps = compression.kind == Kind::int8 ? 127 : 7;
    for (const std::size_t numel : kSizes) {
      const Values in = random_values(numel, static_cast<unsigned>(numel)), out = round_trip(compression, in);
      for (std::size_t i = 0; i < numel; ++i) {
        const std::size_t block = block_of(compression, numel);
        const double step = largest_of(part_of(in, i / block * block, block)) / steps;
        ASSERT_LE(std::abs(static_cast<double>(in[i]) - out[i]), step / 2 * (1 + 1e-4)) << i << " of " << numel;
      }
    }
  }
}

TEST(Compress, ExtremeNumbersStayWhatTheyAre) {
  const float largest = std::numeric_limits<float>::max(), smallest = std::numeric_limits<float>::denorm_min();
  for (const Compression& compression : kAll) {
    if (compression.kind == Kind::bf16) continue;  // whose largest number is smaller than fp32's
    for (const float v : round_trip(compression, {largest, -largest, largest / 2, largest, 0, -largest})) {
      EXPECT_TRUE(std::isfinite(v));
    }
    // 190 / 127 of the smallest number is rounded to 1 of it, of which 190 would not fit into a byte.
    const Values in = {smallest, -190 * smallest, 3 * smallest, 0, -smallest, smallest};
    const Values out = round_trip(compression, in);
    for (std::size_t i = 0; i < in.size(); ++i) {
      EXPECT_LE(std::abs(out[i]), 190 * smallest);
      EXPECT_TRUE(out[i] == 0 || std::signbit(out[i]) == std::signbit(in[i]));
    }
  }
}

TEST(Compress, ZeroStaysZero) {
  for (const Compression& compression : kAll) {
    for (const std::size_t numel : kSizes) {
      const Values zeros(numel, 0.0F);
      EXPECT_TRUE(same_bits(round_trip(compression, zeros), zeros));
      Values residual(numel, 0.0F);
      Bytes bytes = encoded(compression, zeros);
      encode_with_feedback(compression, zeros, residual, bytes, residual);
      EXPECT_TRUE(same_bits(residual, zeros) && bytes == encoded(compression, zeros));
      // And beside numbers that are not 0.
      Values mixed = zeros;
      for (std::size_t i = 0; i < numel; i += 3) mixed[i] = static_cast<float>(i) - 20.5F;
      const Values out = round_trip(compression, mixed);
      for (std::size_t i = 0; i < numel; ++i) {
        if (mixed[i] == 0) {
          ASSERT_EQ(out[i], 0);
        }
      }
    }
    for (const float v : round_trip(compression, Values(9, -0.0F))) EXPECT_EQ(v, 0);
  }
}

TEST(Compress, APieceOfWholeBlocksIsItsBlocks) {
  for (const Compression& compression : kAll) {
    const std::size_t block = block_of(compression, 50);
    const Values values = random_values(2 * block + block / 2, 3);
    Bytes joined;
    for (std::size_t at = 0; at < values.size(); at += block) {
      const Bytes bytes = encoded(compression, part_of(values, at, block));
      joined.insert(joined.end(), bytes.begin(), bytes.end());
    }
    EXPECT_EQ(encoded(compression, values), joined);
    EXPECT_EQ(encoded(compression, values), encoded(compression, values));
  }
}

// The k first of a full sort by magnitude and index, zeros left out: index -> magnitude.
std::map<std::size_t, float> kept_by_sorting(const Values& block, std::size_t k) {
  std::vector<std::size_t> order(block.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return std::abs(block[a]) > std::abs(block[b]); });
  std::map<std::size_t, float> kept;
  for (std::size_t i = 0; i < k; ++i) {
    if (block[order[i]] != 0) kept[order[i]] = std::abs(block[order[i]]);
  }
  return kept;
}

// The least squared error that two levels can have on these magnitudes, over all cuts.
double least_error(const std::map<std::size_t, float>& kept) {
  std::vector<double> magnitudes;
  for (const auto& [index, magnitude] : kept) magnitudes.push_back(magnitude);
  std::sort(magnitudes.begin(), magnitudes.end());
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t cut = 0; cut < magnitudes.size(); ++cut) {
    double error = 0;
    for (const auto& [begin, end] : {std::pair{std::size_t{0}, cut}, {cut, magnitudes.size()}}) {
      double mean = 0;
      for (std::size_t i = begin; i < end; ++i) mean += magnitudes[i] / static_cast<double>(end - begin);
      for (std::size_t i = begin; i < end; ++i) error += (magnitudes[i] - mean) * (magnitudes[i] - mean);
    }
    least = std::min(least, error);
  }
  return magnitudes.empty() ? 0 : least;
}

TEST(CompressTopk, SendsTheLargestWithTheLeastError) {
  for (const Compression& compression : kAll) {
    if (compression.kind != Kind::topk) continue;
    for (const std::size_t numel : kSizes) {
      Values in = random_values(numel, static_cast<unsigned>(numel) + 50);
      for (std::size_t i = 0; i + 3 < numel; i += 5) in[i] = -in[i + 3];  // equal magnitudes
      const Values out = round_trip(compression, in);
      const std::size_t size = block_of(compression, numel);
      for (std::size_t at = 0; at < numel; at += size) {
        const Values block = part_of(in, at, size);
        const auto k = static_cast<std::size_t>(plan::kept_of(compression, static_cast<std::int64_t>(block.size())));
        const auto kept = kept_by_sorting(block, k);
        double error = 0, squares = 0;
        for (std::size_t i = 0; i < block.size(); ++i) {
          if (kept.contains(i)) {
            ASSERT_GT(out[at + i] * std::copysign(1.0F, block[i]), 0);
            error += std::pow(static_cast<double>(block[i]) - out[at + i], 2);
            squares += std::pow(static_cast<double>(block[i]), 2);
          } else {
            ASSERT_TRUE(same_bits({out[at + i]}, {0.0F}));
          }
        }
        ASSERT_LE(error, least_error(kept) + 1e-12 * squares) << numel;
        ASSERT_LE(error, squares);
      }
    }
  }
}

TEST(CompressTopk, TwoMagnitudesArriveAsTheyWere) {
  const Values in = {0, 0.3F, -0.3F, 0, 7, -7, 0.3F, 0};
  EXPECT_TRUE(same_bits(round_trip({Kind::topk, 8, 5}, in), in));
  EXPECT_TRUE(same_bits(round_trip({Kind::topk, 8, 8}, in), in));
  EXPECT_TRUE(same_bits(round_trip({Kind::topk, 8, 1}, in), {0, 0, 0, 0, 7, 0, 0, 0}));  // the first of the two
}

TEST(CompressTopk, BytesAsWorkedByHand) {
  // Kept: -2 at 1 and 1 at 3. Slots of 4 bits from the lowest: index 1, minus, high; index 3, plus, low.
  EXPECT_EQ(encoded({Kind::topk, 4, 2}, {0.5F, -2, 0, 1}), (Bytes{0, 0, 0x80, 0x3f, 0, 0, 0, 0x40, 0b0011'1101}));
}

TEST(CompressFeedback, NothingIsLostOverTheRounds) {
  for (const Compression& compression : kAll) {
    constexpr std::size_t kNumel = 300;
    Values residual(kNumel, 0.0F);
    std::vector<double> values_sum(kNumel, 0), decoded_sum(kNumel, 0);
    for (unsigned round = 0; round < 50; ++round) {
      const Values values = random_values(kNumel, 100 + round), before = residual;
      Bytes bytes = encoded(compression, values);
      Values after(kNumel, 99);
      encode_with_feedback(compression, values, before, bytes, after);
      encode_with_feedback(compression, values, residual, bytes, residual);  // in place
      ASSERT_TRUE(same_bits(after, residual));
      Values sum(kNumel);
      for (std::size_t i = 0; i < kNumel; ++i) sum[i] = values[i] + before[i];
      ASSERT_EQ(bytes, encoded(compression, sum));
      const Values out = decoded(compression, bytes, kNumel);
      for (std::size_t i = 0; i < kNumel; ++i) {
        if (compression.kind != Kind::topk) {
          ASSERT_EQ(static_cast<double>(sum[i]) - out[i], after[i]);  // exact
        }
        values_sum[i] += values[i];
        decoded_sum[i] += out[i];
      }
    }
    for (std::size_t i = 0; i < kNumel; ++i) ASSERT_NEAR(decoded_sum[i] + residual[i], values_sum[i], 1e-6);
  }
}

TEST(CompressFeedback, ResidualsDoNotGrow) {
  for (const Compression& compression : kAll) {
    Values residual(1024, 0.0F);
    double early = 0, late = 0;
    for (unsigned round = 0; round < 400; ++round) {
      const Values values = random_values(residual.size(), 900 + round);
      Bytes bytes = encoded(compression, values);
      encode_with_feedback(compression, values, residual, bytes, residual);
      double square = 0;
      for (const float r : residual) square += static_cast<double>(r) * r;
      (round < 200 ? early : late) = std::max(round < 200 ? early : late, square);
    }
    EXPECT_LE(late, 2 * early) << "kind " << static_cast<int>(compression.kind) << ", block " << compression.block;
  }
}

TEST(Compress, WhatIsNotFiniteIsNotHidden) {
  for (const Compression& compression : kAll) {
    for (const float bad : {kNan, kInfinite, -kInfinite}) {
      for (const std::size_t at : {std::size_t{0}, std::size_t{70}, std::size_t{129}}) {
        Values values = random_values(130, 8);
        values[at] = bad;
        const Values out = round_trip(compression, values);
        const std::size_t block = block_of(compression, 130);
        const bool alone = compression.kind == Kind::none || compression.kind == Kind::bf16;
        for (std::size_t i = 0; i < out.size(); ++i) {
          ASSERT_EQ(std::isfinite(out[i]), alone ? i != at : i / block != at / block);
        }
        Values residual(130, 0.0F);
        Bytes bytes = encoded(compression, values);
        encode_with_feedback(compression, values, residual, bytes, residual);
        EXPECT_FALSE(std::isfinite(residual[at]));
      }
    }
  }
}

TEST(CompressDamaged, AnotherLengthIsRefused) {
  for (const Compression& compression : kAll) {
    for (const std::size_t numel : {std::size_t{0}, std::size_t{1}, std::size_t{65}}) {
      const Bytes good = encoded(compression, random_values(numel, 1));
      Bytes longer = good;
      longer.push_back(0);
      EXPECT_THROW(decoded(compression, longer, numel), base::DamagedError);
      if (good.empty()) continue;
      EXPECT_THROW(decoded(compression, Bytes(good.begin(), good.end() - 1), numel), base::DamagedError);
      EXPECT_THROW(decoded(compression, {}, numel), base::DamagedError);
    }
    Bytes few(3);
    EXPECT_THROW(encode(compression, Values(5), few), base::RunError);
  }
}

TEST(CompressDamaged, BytesThatNoEncoderWritesAreRefused) {
  const Bytes scale = {0, 0, 0x80, 0x3f}, negative = {0, 0, 0x80, 0xbf};
  const auto with = [](Bytes start, const Bytes& end) {
    start.insert(start.end(), end.begin(), end.end());
    return start;
  };
  EXPECT_EQ(decoded({Kind::int8, 8, 0}, with(scale, {0x81}), 1), Values{-127});
  EXPECT_THROW(decoded({Kind::int8, 8, 0}, with(scale, {0x80}), 1), base::DamagedError);
  EXPECT_THROW(decoded({Kind::int8, 8, 0}, with(negative, {1}), 1), base::DamagedError);
  EXPECT_EQ(decoded({Kind::int4, 8, 0}, with(scale, {0x97}), 2), (Values{7, -7}));
  EXPECT_THROW(decoded({Kind::int4, 8, 0}, with(scale, {0x87}), 2), base::DamagedError);
  EXPECT_THROW(decoded({Kind::int4, 8, 0}, with(negative, {0x11}), 2), base::DamagedError);
  const Compression topk{Kind::topk, 3, 2};  // slots of 4 bits
  EXPECT_EQ(decoded(topk, with(with(scale, scale), {0b0010'0001}), 3), (Values{0, 1, 1}));
  EXPECT_THROW(decoded(topk, with(with(scale, scale), {0b0011'0001}), 3), base::DamagedError);  // index 3 of 3
  EXPECT_THROW(decoded(topk, with(with(scale, scale), {0b0001'0010}), 3), base::DamagedError);  // 2, then 1
  EXPECT_THROW(decoded(topk, with(with(negative, scale), {0b0010'0001}), 3), base::DamagedError);
  EXPECT_THROW(decoded(topk, with(with(scale, negative), {0b0010'0001}), 3), base::DamagedError);
}

TEST(CompressDamaged, AnyBytesAreDecodedOrRefused) {
  std::mt19937 random(77);
  for (const Compression& compression : kAll) {
    for (int attempt = 0; attempt < 300; ++attempt) {
      const std::size_t numel = random() % 150;
      Bytes bytes = encoded(compression, random_values(numel, random()));
      const bool slight = attempt % 2 == 0;  // some bytes of a sound message, or all
      for (std::uint8_t& byte : bytes) {
        if (!slight || random() % 16 == 0) byte = static_cast<std::uint8_t>(random());
      }
      try {
        const Values out = decoded(compression, bytes, numel);
        for (const float v : out) ASSERT_NE(v, 99);  // every element was written
      } catch (const base::DamagedError&) {
      }
    }
  }
}

}  // namespace
}  // namespace fedshard::federation
