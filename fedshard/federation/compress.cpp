#include "fedshard/federation/compress.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "fedshard/base/error.h"

namespace fedshard::federation {
namespace {

using plan::Compression;
using Kind = Compression::Kind;
using Bytes = std::span<const std::uint8_t>;
using MutableBytes = std::span<std::uint8_t>;

static_assert(std::endian::native == std::endian::little, "the encodings are little-endian");

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class T>
T load(Bytes bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class T>
void store(MutableBytes bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}

void check_scale(float scale) {
  if (scale < 0) base::fail<base::DamagedError>("damaged compressed piece: a scale of {}", scale);
}

// A unit in this number's last place is 1, so adding and subtracting it rounds to a whole number, ties to even.
constexpr double kRounder = 0x1.8p52;

float scale_of(std::span<const float> block, int largest) {
  if (!all_finite(block)) return kNan;
  float magnitude = 0;
  for (const float v : block) magnitude = std::max(magnitude, std::abs(v));
  const float scale = magnitude / static_cast<float>(largest);
  const bool overflows = static_cast<double>(scale) * largest > std::numeric_limits<float>::max();
  return overflows ? std::nextafter(scale, 0.0F) : scale;
}

// scale 0: a block of zeros, or of numbers so small that no scale can be had; they stay in the residual.
int number_of(float value, float scale, int largest) {
  if (!(scale > 0)) return 0;
  const double rounded = (static_cast<double>(value) / scale + kRounder) - kRounder;
  return static_cast<int>(std::clamp<double>(rounded, -largest, largest));  // a subnormal scale is far from exact
}

void check_number(int number, int largest) {
  if (number < -largest) base::fail<base::DamagedError>("damaged compressed piece: the number {}", number);
}

void encode_int8(std::span<const float> block, MutableBytes bytes) {
  const float scale = scale_of(block, 127);
  store(bytes, 0, scale);
  for (std::size_t i = 0; i < block.size(); ++i) {
    bytes[4 + i] = static_cast<std::uint8_t>(number_of(block[i], scale, 127));
  }
}

void decode_int8(Bytes bytes, std::span<float> block) {
  const float scale = load<float>(bytes, 0);
  check_scale(scale);
  for (std::size_t i = 0; i < block.size(); ++i) {
    const int number = static_cast<std::int8_t>(bytes[4 + i]);
    check_number(number, 127);
    block[i] = static_cast<float>(number) * scale;
  }
}

void encode_int4(std::span<const float> block, MutableBytes bytes) {
  const float scale = scale_of(block, 7);
  store(bytes, 0, scale);
  for (std::size_t i = 0; i < block.size(); i += 2) {
    const int low = number_of(block[i], scale, 7);
    const int high = i + 1 < block.size() ? number_of(block[i + 1], scale, 7) : 0;
    bytes[4 + i / 2] = static_cast<std::uint8_t>((low & 15) | (high & 15) << 4);
  }
}

void decode_int4(Bytes bytes, std::span<float> block) {
  const float scale = load<float>(bytes, 0);
  check_scale(scale);
  for (std::size_t i = 0; i < block.size(); ++i) {
    const int half = bytes[4 + i / 2] >> (i % 2 == 0 ? 0 : 4) & 15;
    const int number = half < 8 ? half : half - 16;
    check_number(number, 7);
    block[i] = static_cast<float>(number) * scale;
  }
}

// Numbers of a few bits, one after the other, lowest bit first. The last byte's rest is 0.
class BitWriter {
 public:
  explicit BitWriter(MutableBytes bytes) : bytes_(bytes) { std::fill(bytes.begin(), bytes.end(), std::uint8_t{0}); }
  void write(std::uint32_t number, int bits) {
    for (int b = 0; b < bits; ++b, ++at_) bytes_[at_ / 8] |= static_cast<std::uint8_t>((number >> b & 1U) << at_ % 8);
  }

 private:
  MutableBytes bytes_;
  std::size_t at_ = 0;
};

class BitReader {
 public:
  explicit BitReader(Bytes bytes) : bytes_(bytes) {}
  std::uint32_t read(int bits) {
    std::uint32_t number = 0;
    for (int b = 0; b < bits; ++b, ++at_) number |= (bytes_[at_ / 8] >> at_ % 8 & 1U) << b;
    return number;
  }

 private:
  Bytes bytes_;
  std::size_t at_ = 0;
};

// The magnitude's bits above, the index's complement below: a larger key is a larger magnitude, or an equal one with a
// lower index. All keys differ, so any way to sort them gives the same.
std::uint64_t key_of(float value, std::size_t index) {
  const std::uint64_t magnitude = std::bit_cast<std::uint32_t>(std::abs(value));
  return magnitude << 32 | (0xffffffffU - static_cast<std::uint32_t>(index));
}
std::uint32_t index_of(std::uint64_t key) { return 0xffffffffU - static_cast<std::uint32_t>(key); }
float magnitude_of(std::uint64_t key) { return std::bit_cast<float>(static_cast<std::uint32_t>(key >> 32)); }

// Of the `kept` largest magnitudes those that are not 0, the largest first.
std::vector<std::uint64_t> largest_of(std::span<const float> block, std::int64_t kept) {
  std::vector<std::uint64_t> keys;
  keys.reserve(block.size());
  for (std::size_t i = 0; i < block.size(); ++i) {
    if (block[i] != 0) keys.push_back(key_of(block[i], i));
  }
  const auto end = keys.begin() + std::min(kept, static_cast<std::int64_t>(keys.size()));
  std::nth_element(keys.begin(), end, keys.end(), std::greater<>());
  keys.erase(end, keys.end());
  std::sort(keys.begin(), keys.end(), std::greater<>());
  return keys;
}

struct Classes {
  std::size_t high_count = 0;  // the first of the sorted keys; the others are low
  float low = 0, high = 0;
};

// With S the sum and n the size of a class, the squared error is the sum of the squares less S^2 / n of both classes.
// The cut makes these largest.
Classes classes_of(const std::vector<std::uint64_t>& keys) {
  double total = 0;
  for (const std::uint64_t key : keys) total += magnitude_of(key);
  Classes classes;
  double high = 0, best = -1;
  for (std::size_t n = 1; n <= keys.size(); ++n) {
    high += magnitude_of(keys[n - 1]);
    const double low = total - high, high_mean = high / static_cast<double>(n);
    const double low_mean = n < keys.size() ? low / static_cast<double>(keys.size() - n) : 0;
    const double explained = high * high_mean + low * low_mean;
    if (explained <= best) continue;
    best = explained;
    classes = {n, static_cast<float>(low_mean), static_cast<float>(high_mean)};
  }
  return classes;
}

void encode_topk(std::int64_t kept, std::span<const float> block, MutableBytes bytes) {
  std::vector<std::uint64_t> keys;
  Classes classes{0, kNan, kNan};
  if (all_finite(block)) {
    keys = largest_of(block, kept);
    classes = classes_of(keys);
  }
  store(bytes, 0, classes.low);
  store(bytes, 4, classes.high);
  std::vector<std::uint32_t> slots;  // index, then the bit of the class
  for (std::size_t i = 0; i < keys.size(); ++i) slots.push_back(index_of(keys[i]) << 1 | (i < classes.high_count));
  std::sort(slots.begin(), slots.end());
  slots.resize(static_cast<std::size_t>(kept), slots.empty() ? 0 : slots.back());
  const int bits = plan::index_bits(static_cast<std::int64_t>(block.size()));
  BitWriter writer(bytes.subspan(8));
  for (const std::uint32_t slot : slots) {
    writer.write(slot >> 1, bits);
    writer.write(std::signbit(block[slot >> 1]), 1);
    writer.write(slot & 1, 1);
  }
}

void decode_topk(std::int64_t kept, Bytes bytes, std::span<float> block) {
  const float low = load<float>(bytes, 0), high = load<float>(bytes, 4);
  check_scale(low);
  check_scale(high);
  const bool finite = std::isfinite(low) && std::isfinite(high);
  std::fill(block.begin(), block.end(), finite ? 0.0F : kNan);
  const int bits = plan::index_bits(static_cast<std::int64_t>(block.size()));
  BitReader reader(bytes.subspan(8));
  std::uint32_t previous = 0;
  for (std::int64_t slot = 0; slot < kept; ++slot) {
    const std::uint32_t index = reader.read(bits);
    const bool negative = reader.read(1) == 1;
    const float level = reader.read(1) == 1 ? high : low;
    if (index >= block.size() || index < previous) {
      base::fail<base::DamagedError>("damaged compressed piece: index {} after {} in a block of {}", index, previous,
                                     block.size());
    }
    previous = index;
    if (finite) block[index] = negative && level > 0 ? -level : level;
  }
}

void encode_block(const Compression& compression, std::span<const float> block, MutableBytes bytes) {
  switch (compression.kind) {
    case Kind::none:
      std::memcpy(bytes.data(), block.data(), bytes.size());
      return;
    case Kind::bf16:
      for (std::size_t i = 0; i < block.size(); ++i) store(bytes, 2 * i, c10::BFloat16(block[i]).x);
      return;
    case Kind::int8:
      return encode_int8(block, bytes);
    case Kind::int4:
      return encode_int4(block, bytes);
    case Kind::topk:
      return encode_topk(plan::kept_of(compression, static_cast<std::int64_t>(block.size())), block, bytes);
  }
}

void decode_block(const Compression& compression, Bytes bytes, std::span<float> block) {
  switch (compression.kind) {
    case Kind::none:
      std::memcpy(block.data(), bytes.data(), bytes.size());
      return;
    case Kind::bf16:
      for (std::size_t i = 0; i < block.size(); ++i) {
        block[i] = c10::BFloat16(load<std::uint16_t>(bytes, 2 * i), c10::BFloat16::from_bits());
      }
      return;
    case Kind::int8:
      return decode_int8(bytes, block);
    case Kind::int4:
      return decode_int4(bytes, block);
    case Kind::topk:
      return decode_topk(plan::kept_of(compression, static_cast<std::int64_t>(block.size())), bytes, block);
  }
}

std::size_t bytes_of(const Compression& compression, std::size_t numel) {
  return static_cast<std::size_t>(plan::encoded_bytes(compression, static_cast<std::int64_t>(numel)));
}

// visit(first element, elements, first byte, bytes) for each block of a piece. none and bf16 know no blocks: any size
// will do.
template <class Visit>
void for_each_block(const Compression& compression, std::size_t numel, Visit visit) {
  const std::size_t step = plan::has_blocks(compression.kind) ? static_cast<std::size_t>(compression.block) : 256;
  for (std::size_t begin = 0, byte = 0; begin < numel; begin += step) {
    const std::size_t size = std::min(step, numel - begin), bytes = bytes_of(compression, size);
    visit(begin, size, byte, bytes);
    byte += bytes;
  }
}

void require_size(const Compression& compression, std::size_t numel, MutableBytes bytes) {
  base::require(bytes.size() == bytes_of(compression, numel), "{} bytes for {} compressed elements", bytes.size(),
                numel);
}

}  // namespace

void encode(const Compression& compression, std::span<const float> values, MutableBytes bytes) {
  require_size(compression, values.size(), bytes);
  for_each_block(compression, values.size(), [&](std::size_t at, std::size_t size, std::size_t byte, std::size_t n) {
    encode_block(compression, values.subspan(at, size), bytes.subspan(byte, n));
  });
}

void encode_with_feedback(const Compression& compression, std::span<const float> values,
                          std::span<const float> residual, MutableBytes bytes, std::span<float> new_residual) {
  require_size(compression, values.size(), bytes);
  base::require(residual.size() == values.size() && new_residual.size() == values.size(),
                "residuals of {} and {} for {} values", residual.size(), new_residual.size(), values.size());
  std::vector<float> decoded;
  for_each_block(compression, values.size(), [&](std::size_t at, std::size_t size, std::size_t byte, std::size_t n) {
    const std::span<float> sum = new_residual.subspan(at, size);
    for (std::size_t i = 0; i < size; ++i) sum[i] = values[at + i] + residual[at + i];
    encode_block(compression, sum, bytes.subspan(byte, n));
    decoded.resize(size);
    decode_block(compression, bytes.subspan(byte, n), decoded);
    for (std::size_t i = 0; i < size; ++i) sum[i] -= decoded[i];
  });
}

void decode(const Compression& compression, Bytes bytes, std::span<float> values) {
  const std::size_t wanted = bytes_of(compression, values.size());
  if (bytes.size() != wanted) {
    base::fail<base::DamagedError>("damaged compressed piece: {} bytes for {} elements, which take {}", bytes.size(),
                                   values.size(), wanted);
  }
  for_each_block(compression, values.size(), [&](std::size_t at, std::size_t size, std::size_t byte, std::size_t n) {
    decode_block(compression, bytes.subspan(byte, n), values.subspan(at, size));
  });
}

}  // namespace fedshard::federation
