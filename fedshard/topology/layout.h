// Where each rank stands: the world split into federation groups, each group into replicas of shards. Integers only.
// A surprise: nothing here is a mode. ddp, fsdp, hsdp and their federated forms are names given to the numbers
// afterwards, and groups of unequal size and shape are ordinary layouts.
#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace fedshard::topology {

// One number for all groups, or one number by group.
using NumberOrList = std::variant<int, std::vector<int>>;

// A degree that takes what the other one leaves of the group.
inline constexpr int rest_of_group = -1;

struct LayoutOptions {
  NumberOrList groups = 1;                    // how many equal groups, or the size of each in ranks
  NumberOrList shard_degree = rest_of_group;  // shards F of a group
  NumberOrList replicate_degree = 1;          // replicas R of a group; F * R = ranks of the group
};

struct GroupShape {
  int first_rank = 0;  // a group's ranks are contiguous
  int ranks = 1;
  int shards = 1;
  int replicas = 1;  // shards * replicas == ranks
  bool operator==(const GroupShape&) const = default;
};

struct Coordinates {
  int group = 0;
  int replica = 0;
  int shard = 0;
  int local = 0;  // index in the group: replica * shards + shard, so one copy of the model is a contiguous run of ranks
  bool operator==(const Coordinates&) const = default;
};

class Layout {
 public:
  // Throws UsageError, naming both numbers, where `world` ranks can't be laid out as asked: sizes that don't sum to the
  // world, degrees that don't divide or fill a group, a list that has not one number by group, both degrees -1.
  static Layout make(int world, const LayoutOptions& options);

  int world() const { return static_cast<int>(group_of_.size()); }
  int groups() const { return static_cast<int>(shapes_.size()); }
  const GroupShape& group(int group) const;
  const std::vector<GroupShape>& shapes() const { return shapes_; }
  std::vector<int> sizes() const;  // ranks of each group, in group order

  int group_of(int rank) const;
  Coordinates at(int rank) const;
  int rank_of(int group, int replica, int shard) const;  // inverse of at()

  // Lists of ranks in ascending order, the asking rank among them.
  std::vector<int> shard_peers(int rank) const;    // same group and replica: they hold one copy of the model together
  std::vector<int> replica_peers(int rank) const;  // same group and shard: they hold the same part of the model
  std::vector<int> group_peers(int rank) const;    // the whole group
  // The fewest ranks that the rank and its peers at a round can be kept to, some of each group. In equal groups the
  // twins (same replica and shard); where shard counts alone are equal, the shard in all groups; otherwise the world.
  std::vector<int> federation_peers(int rank) const;

  bool equal_shards() const;  // all groups have as many shards
  bool equal_groups() const;  // ... and as many replicas

  // The name of the numbers: the first row that fits of ddp (one shard), fsdp (one replica), hsdp, with "fl+" before it
  // where there are several groups. So a single rank is "ddp". Unequal groups fit a row when all of them do.
  std::string strategy() const;
  // One line: "fl+hsdp: 8 ranks = 2 groups x 2 replicas x 2 shards".
  std::string describe() const;

 private:
  std::vector<GroupShape> shapes_;
  std::vector<int> group_of_;  // by rank
};

}  // namespace fedshard::topology
