// Slurm's compressed node lists, taken apart without `scontrol`.
// The surprising part: a list may hold several brackets a name (`r[1-2]n[3-4]`) and commas on two levels, so it is
// parsed, not split.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace fedshard::control {

// The hosts of `list` in its order: "a,b[001,003-004],c" -> a b001 b003 b004 c. Numbers keep the width they are written
// with; where a name has several brackets, the last one runs fastest. An empty list has no hosts.
// Throws UsageError, naming the list, for unbalanced brackets, empty parts, ranges that run backwards, or more than
// 1,000,000 hosts.
std::vector<std::string> expand_hosts(std::string_view list);

}  // namespace fedshard::control
