#include <gtest/gtest.h>

#include "fedshard/control/membership.h"

namespace fedshard::control {
namespace {

TEST(OwnWords, DropTheSpeakersNameAlone) {
  EXPECT_EQ(own_words(1, 0, "rank 1: disk full"), "disk full");
  EXPECT_EQ(own_words(1, 0, "rank 1 (group 0): disk full"), "disk full");
  EXPECT_EQ(own_words(1, 0, "rank 1 fell silent; rank 0 lost its peers"), "fell silent; rank 0 lost its peers");
  for (const char* others : {"", "rank 1", "rank 12: disk full", "rank 2: disk full", "the rank 1: x"}) {
    EXPECT_EQ(own_words(1, 0, others), others);
  }
}

}  // namespace
}  // namespace fedshard::control
