// Where records go: the file, the progress display.
// A surprise: a sink takes JSON, not Record. Records of other ranks reach the launcher as JSON, and a line may carry
// fields that this program doesn't know; the file must not lose them.
#pragma once
#include <nlohmann/json_fwd.hpp>

namespace fedshard::metrics {

class Sink {
 public:
  virtual ~Sink() = default;
  // `line` is one object with "kind", "step" and "time_s"; on return it is where it should be. Throws RunError where it
  // can't be taken. Not safe from several threads at once.
  virtual void write(const nlohmann::json& line) = 0;
};

}  // namespace fedshard::metrics
