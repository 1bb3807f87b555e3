#include "fedshard/topology/scheme.h"

#include <gtest/gtest.h>

#include "fedshard/base/error.h"

namespace fedshard::topology {
namespace {

std::string refusal(const std::string& text) {
  try {
    buckets_of(text);
  } catch (const base::UsageError& e) {
    return e.what();
  }
  return "";
}

TEST(Scheme, BucketsAreWordsOrSizes) {
  for (const auto& [text, buckets] : {std::pair{"whole", Buckets{}},
                                      {"unit", Buckets{Buckets::By::unit}},
                                      {"4B", Buckets{Buckets::By::size, 1}},
                                      {"12B", Buckets{Buckets::By::size, 3}},
                                      {"1KiB", Buckets{Buckets::By::size, 256}},
                                      {"25MiB", Buckets{Buckets::By::size, 25 << 18}},
                                      {"1024GiB", Buckets{Buckets::By::size, std::int64_t{1} << 38}}}) {
    EXPECT_EQ(buckets_of(text), buckets) << text;
    EXPECT_EQ(text_of(buckets), text);
  }
  EXPECT_EQ(text_of(buckets_of("1024KiB")), "1MiB");
}

TEST(Scheme, OtherBucketsAreRefused) {
  for (const char* bad : {"", "half", "MiB", "25", "25mb", "25 MiB", "1.5MiB", "whole ", "x4B"}) {
    EXPECT_EQ(refusal(bad),
              "a bucket is \"whole\", \"unit\" or a size such as \"25MiB\" (B, KiB, MiB, GiB), and not '" +
                  std::string(bad) + "'");
  }
  for (const char* bad : {"0MiB", "-4B", "3B", "1025GiB", "9223372036854775807GiB"}) {
    EXPECT_EQ(refusal(bad), "a bucket has from 4 B to 1024 GiB, a multiple of 4, and not '" + std::string(bad) + "'");
  }
  EXPECT_NE(refusal("9223372036854775808B"), "");
}

TEST(Scheme, NaivePairsReplicas) {
  const auto shards_differ = Layout::make(6, {std::vector<int>{4, 2}, std::vector<int>{2, 1}, 2});
  const auto replicas_differ = Layout::make(6, {std::vector<int>{4, 2}, 2, std::vector<int>{2, 1}});
  EXPECT_NO_THROW(check_scheme(Scheme::naive, shards_differ));
  EXPECT_NO_THROW(check_scheme(Scheme::naive, Layout::make(4, {1, 1, 4})));
  EXPECT_NO_THROW(check_scheme(Scheme::leader, replicas_differ));
  EXPECT_NO_THROW(check_scheme(Scheme::split, replicas_differ));
  try {
    check_scheme(Scheme::naive, replicas_differ);
    FAIL();
  } catch (const base::UsageError& e) {
    EXPECT_STREQ(e.what(),
                 "scheme = \"naive\" pairs the replicas of all groups, but group 0 has 2 and group 1 has 1; take "
                 "\"split\" or \"leader\"");
  }
}

}  // namespace
}  // namespace fedshard::topology
