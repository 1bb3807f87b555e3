#include "fedshard/nn/init.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "fedshard/base/error.h"

namespace fedshard::nn {
namespace {

using Lanes = std::array<double, 4>;

// (0, 1]: never zero, so its logarithm is finite.
double open_unit(std::uint32_t bits) { return (static_cast<double>(bits) + 1.0) * 0x1p-32; }

// Two pairs of independent standard normal variates from four words: Box and Muller, Ann. Math. Stat. 29 (1958).
Lanes normal_block(std::uint64_t seed, std::uint64_t block) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const auto words = philox4x32({low(block), high(block), 0, 0}, {low(seed), high(seed)});
  Lanes lanes;
  for (int pair = 0; pair < 2; ++pair) {
    const double radius = std::sqrt(-2.0 * std::log(open_unit(words[2 * pair])));
    const double angle = 2.0 * std::numbers::pi * open_unit(words[2 * pair + 1]);
    lanes[2 * pair] = radius * std::cos(angle);
    lanes[2 * pair + 1] = radius * std::sin(angle);
  }
  return lanes;
}

void fill_normal(std::uint64_t seed, std::uint64_t first, double std, std::span<float> out) {
  std::uint64_t block = first / 4;
  Lanes lanes = normal_block(seed, block);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::uint64_t index = first + i;
    if (index / 4 != block) {
      block = index / 4;
      lanes = normal_block(seed, block);
    }
    out[i] = static_cast<float>(std * lanes[index % 4]);
  }
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9;  // the golden ratio
    key[1] += 0xBB67AE85;  // sqrt(3) - 1
  }
  return counter;
}

float normal_at(std::uint64_t seed, std::uint64_t index) {
  return static_cast<float>(normal_block(seed, index / 4)[index % 4]);
}

void initialize_slice(const plan::ModelPlan& plan, std::uint64_t seed, int unit, std::int64_t begin, std::int64_t end,
                      std::span<float> out) {
  base::require(unit >= 0 && unit < static_cast<int>(plan.units.size()), "unit {} of {}", unit, plan.units.size());
  const plan::UnitSpec& spec = plan.units[unit];
  base::require(0 <= begin && begin <= end && end <= spec.numel() && std::ssize(out) == end - begin,
                "slice [{}, {}) of unit '{}' with {} elements into {} values", begin, end, spec.name, spec.numel(),
                out.size());
  std::int64_t start = 0;
  for (const plan::ParameterSpec& parameter : spec.parameters) {
    const topology::Range mine{std::max(begin, start), std::min(end, start + parameter.numel())};
    start += parameter.numel();
    for (const plan::GlobalRun& run : plan.global_runs(unit, mine)) {
      const auto part = out.subspan(run.range.begin - begin, run.range.size());
      if (parameter.init.kind == plan::Initializer::Kind::constant) {
        std::fill(part.begin(), part.end(), static_cast<float>(parameter.init.value));
      } else {
        fill_normal(seed, static_cast<std::uint64_t>(run.index), parameter.init.value, part);
      }
    }
  }
}

}  // namespace fedshard::nn
