// What --virtual-groups makes of a config.
#include <gtest/gtest.h>

#include "fedshard/config/config.h"
#include "tests/unit/config/config_text.h"

namespace fedshard::config {
namespace {

std::string with_groups(const std::string& groups) { return smallest + "[parallelism]\ngroups = " + groups + "\n"; }

TEST(VirtualGroups, AreTheGroupsOfTheConfig) {
  const Config real = load(with_groups("3"));
  EXPECT_EQ(with_virtual_groups(load(smallest), 3), real);
  EXPECT_EQ(with_virtual_groups(real, 3), real);
  const Config list = load(with_groups("[2, 2, 2]"));
  EXPECT_EQ(with_virtual_groups(list, 3), list);
  EXPECT_EQ(with_virtual_groups(load(smallest), 1), load(smallest));
  EXPECT_EQ(with_virtual_groups(load(with_groups("[4]")), 1), load(with_groups("[4]")));
}

TEST(VirtualGroups, RefuseOtherGroups) {
  const auto refuse = [](const std::string& text, int groups) {
    return refusal_of([&] { with_virtual_groups(load(text), groups); });
  };
  EXPECT_EQ(refuse(with_groups("3"), 2), "--virtual-groups 2 makes 2 groups, but [parallelism] groups is 3");
  EXPECT_EQ(refuse(with_groups("2"), 1), "--virtual-groups 1 makes 1 groups, but [parallelism] groups is 2");
  EXPECT_EQ(refuse(with_groups("[1, 3]"), 2),
            "--virtual-groups 2 makes 2 equal groups, but [parallelism] groups is [1, 3]");
  EXPECT_EQ(refuse(with_groups("[2, 2, 2]"), 2),
            "--virtual-groups 2 makes 2 equal groups, but [parallelism] groups is [2, 2, 2]");
  const std::string by_time = smallest + "[federation]\nevery = \"90s\"\n";
  EXPECT_EQ(refuse(by_time, 2),
            "--virtual-groups trains groups in turn, so what each gets done in a time says nothing of real ones, but "
            "[federation] every is \"90s\": set it to steps or tokens");
  EXPECT_EQ(with_virtual_groups(load(by_time), 1), load(by_time));
  EXPECT_NE(refuse(smallest + "[comm]\nbackend = \"nccl\"\n", 2).find("choose another backend"), std::string::npos);
}

}  // namespace
}  // namespace fedshard::config
