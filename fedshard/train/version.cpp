#include "fedshard/train/version.h"

#include <torch/headeronly/version.h>

namespace fedshard::train {

std::map<std::string, std::string> versions() { return {{"fedshard", FEDSHARD_VERSION}, {"torch", TORCH_VERSION}}; }

}  // namespace fedshard::train
