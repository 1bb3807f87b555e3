// What this program is made of, for records and for `fedshard --version`.
#pragma once
#include <map>
#include <string>

namespace fedshard::train {

// "fedshard" -> "0.1.0", "torch" -> "2.13.0"
std::map<std::string, std::string> versions();

}  // namespace fedshard::train
