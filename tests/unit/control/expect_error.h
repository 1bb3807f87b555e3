// EXPECT_THROW with a look at the message: the text is part of what a user gets.
#pragma once
#include <gtest/gtest.h>

#include <string>

namespace fedshard::control {

template <class Kind, class Body>
void expect_error(const Body& body, const std::string& part) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown where '" << part << "' was due";
  } catch (const Kind& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

}  // namespace fedshard::control
