// What LibTorch and Gloo say when something breaks, as one line for people.
// A surprise: their messages carry a stack trace, source positions and advice to look elsewhere; all of that goes.
#pragma once
#include <exception>
#include <string>

namespace fedshard::comm {

// The first line of `error` without "[file.cc:12] " or "[enforce fail at file.cpp:12] " before it and "This is
// typically caused by ..." behind it.
std::string plain_words(const std::exception& error);

}  // namespace fedshard::comm
