#include "fedshard/shard/digest.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>

#include "fedshard/base/error.h"
#include "fedshard/plan/group_local.h"
#include "tests/support/rank_threads.h"
#include "tests/support/tiny_model.h"

namespace fedshard::shard {
namespace {

using testing_support::tiny_model;

topology::Layout layout_of(int groups, int replicas, int shards) {
  return topology::Layout::make(groups * replicas * shards,
                                {.groups = groups, .shard_degree = shards, .replicate_degree = replicas});
}

// What agreed_digest says on every rank of the layout, numbers and errors alike, when the ranks `odd` hold another
// first element than the rest; `local`: patterns of what is group-local.
std::set<std::string> answers(const topology::Layout& layout, const std::set<int>& odd,
                              const std::vector<std::string>& local = {}) {
  const plan::ModelPlan plan = plan::keep_in_groups(tiny_model({}).plan, {{}, local});
  std::mutex mutex;
  std::set<std::string> said;
  testing_support::on_ranks(layout, [&](int rank, comm::Axes& axes) {
    const topology::Coordinates at = layout.at(rank);
    const ArenaMap map(plan, layout.group(at.group).shards, at.shard);
    const Arena arena(map);
    for (int u = 0; u < map.units(); ++u) {
      const topology::Range held = map.range(u);
      const at::Tensor values = arena.real(u);
      testing_support::tiny_filler(plan)(u, held,
                                         {values.mutable_data_ptr<float>(), static_cast<std::size_t>(values.numel())});
    }
    if (odd.count(rank) > 0) arena.real(0)[0].add_(1e-6);
    std::string answer;
    try {
      answer = std::to_string(agreed_digest(plan, arena, axes));
    } catch (const base::RunError& e) {
      answer = e.what();
    }
    const std::lock_guard lock(mutex);
    said.insert(answer);
  });
  return said;
}

TEST(AgreedDigest, IsTheSameInEveryLayout) {
  const auto alone = answers(layout_of(1, 1, 1), {});
  ASSERT_EQ(alone.size(), 1u);
  EXPECT_GT(*alone.begin(), "0");
  for (const auto& layout : {layout_of(1, 1, 2), layout_of(1, 1, 5), layout_of(1, 3, 1), layout_of(3, 1, 1),
                             layout_of(2, 2, 2), layout_of(3, 2, 1), layout_of(1, 1, 97)}) {
    EXPECT_EQ(answers(layout, {}), alone) << layout.describe();
  }
  EXPECT_NE(answers(layout_of(1, 1, 2), {0}), alone);  // one bit more is another model
}

TEST(AgreedDigest, EveryRankThrowsWhereOneIsDifferent) {
  for (const auto& layout : {layout_of(1, 2, 1), layout_of(2, 1, 1), layout_of(2, 2, 2), layout_of(3, 3, 1)}) {
    for (const int group : {0, layout.groups() - 1}) {
      const int odd = layout.group(group).first_rank + layout.group(group).ranks - layout.group(group).shards;
      const auto said = answers(layout, {odd});
      EXPECT_FALSE(said.empty());
      for (const std::string& text : said) {
        EXPECT_NE(text.find("should hold the same model"), text.npos) << layout.describe() << ": " << text;
      }
    }
  }
}

// The first element is the table's. Groups may differ in it where that is group-local, replicas of one group may not.
TEST(AgreedDigest, LeavesGroupLocalParametersToTheReplicas) {
  const std::vector<std::string> local{"table"};
  const auto alike = answers(layout_of(1, 1, 1), {}, local);
  EXPECT_NE(alike, answers(layout_of(1, 1, 1), {}));
  EXPECT_EQ(answers(layout_of(2, 2, 2), {}, local), alike);
  EXPECT_EQ(answers(layout_of(2, 2, 2), {4, 6}, local), alike);  // both replicas' first shards of the second group
  for (const std::string& text : answers(layout_of(2, 2, 2), {6}, local)) {
    EXPECT_TRUE(text.starts_with("ranks 4 and 6 should hold the same model") ||
                text.starts_with("ranks 5 and 7 should hold the same model"))  // their second shards
        << text;
  }
  for (const std::string& text : answers(layout_of(2, 1, 1), {1}, {"*.gain"})) {  // the table is exchanged
    EXPECT_EQ(text.find("ranks 0 and 1 should hold the same model"), 0u) << text;
  }
}

}  // namespace
}  // namespace fedshard::shard
