// Encoding a piece of the pseudo-gradient in the bytes that plan/compression.h counts, and decoding it, on the CPU.
//
// What the bytes are, little-endian, block after block:
//   none, bf16  the numbers, bf16 rounded to the nearest, ties to even
//   int8, int4  fp32 scale = largest magnitude / 127 (int4: / 7), then round(value / scale), ties to even, in two's
//               complement; int4 two a byte, the first in the low half, an odd block's last half 0
//   topk        fp32 low, fp32 high, then a bit stream (lowest bit first) of k times index, sign, class. Sent are the k
//               largest magnitudes (of equal ones the first), by ascending index, each as + or -, low or high. The two
//               levels are the means of the k magnitudes' two classes, cut where the squared error is least
// Zeros are never sent: a slot of topk that has no value to send repeats the one before it.
//
// A surprise: topk has two levels a block, where the authors' program has a shift and the means of four bins a tensor
// (https://github.com/one-covenant/SparseLoCo). One scale with levels in equal steps would not do: beside one large
// value, small ones would be sent as much larger than they are, and their residuals would grow from round to round.
// With means no block's squared error exceeds that of sending nothing.
//
// Not finite: bf16 and none keep such values; a block of the others that has one decodes as NaN throughout.
#pragma once
#include <cstdint>
#include <span>

#include "fedshard/plan/compression.h"

namespace fedshard::federation {

// `bytes` has encoded_bytes(values.size()). The bytes depend on compression and values alone. Zeros decode as zeros.
void encode(const plan::Compression& compression, std::span<const float> values, std::span<std::uint8_t> bytes);

// Error feedback: encodes sum = values + residual, rounded to fp32, and sets new_residual = sum - decoded. That
// difference is exact in fp32, except for topk's elements that differ from their level by more than a factor of 2,
// where it is rounded once; so what was decoded over the rounds and the last residual add up to the values but for fp32
// rounding. All of values, residual and new_residual have one size; new_residual may be residual, or keep the old one
// as it is until the commit. A residual that is not finite stays so: leave such pieces out before.
void encode_with_feedback(const plan::Compression& compression, std::span<const float> values,
                          std::span<const float> residual, std::span<std::uint8_t> bytes,
                          std::span<float> new_residual);

// Fills `values`. `bytes` may be anything: throws DamagedError for a wrong length and for what encode never writes
// where it would do harm (an index outside its block or out of order, a number outside its range, a scale below 0);
// `values` is then undefined.
void decode(const plan::Compression& compression, std::span<const std::uint8_t> bytes, std::span<float> values);

}  // namespace fedshard::federation
