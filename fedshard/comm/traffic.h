// Bytes handed to point-to-point sends, by purpose and by whether they leave the federation group. These are the
// counters that must equal the cost analysis to the byte, so they count payload at the one place where it leaves.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace fedshard::comm {

enum class Purpose { gather, reduce, replica, aggregate, state, control };
inline constexpr int kPurposes = 6;
const char* name_of(Purpose purpose);

// Cumulative payload bytes.
struct Traffic {
  std::array<std::int64_t, kPurposes> by_purpose{};
  std::int64_t intra_group = 0;
  std::int64_t inter_group = 0;
  std::int64_t of(Purpose purpose) const { return by_purpose[static_cast<int>(purpose)]; }
  Traffic& operator+=(const Traffic& other);
};

// One a rank, shared by its communicators. Safe from any thread.
class TrafficCounter {
 public:
  // group_of[rank] for every rank of the world.
  explicit TrafficCounter(std::vector<int> group_of) : group_of_(std::move(group_of)) {}
  void add(Purpose purpose, int from, int to, std::int64_t bytes);
  Traffic read() const;

 private:
  std::vector<int> group_of_;
  std::array<std::atomic<std::int64_t>, kPurposes> by_purpose_{};
  std::atomic<std::int64_t> intra_group_{0};
  std::atomic<std::int64_t> inter_group_{0};
};

}  // namespace fedshard::comm
