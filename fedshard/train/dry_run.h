// `fedshard train --dry-run`: what a run would be, without starting it or allocating its model.
#pragma once
#include "fedshard/topology/layout.h"
#include "fedshard/train/config.h"

namespace fedshard::train {

// Prints the resolved config, the layout, the memory of a rank and the predicted traffic to standard output.
void print_dry_run(const Config& config, const topology::Layout& layout);

}  // namespace fedshard::train
