// The bytes that tensors hold in this process, counted in LibTorch's allocator, whichever thread asks for them. So a
// run can be held to the memory table it has shown (plan/memory.h), and not only to its resident memory, which has the
// libraries in it.
#pragma once
#include <cstdint>

namespace fedshard::train {

// From now on CPU tensors are counted. To be called once, before the first tensor; it can't be undone.
void count_tensor_memory();

// Since then: the most that was allocated at once. Blocks count as the C library sizes them, some bytes above what was
// asked for.
std::int64_t peak_tensor_bytes();

// What is allocated now, from which the peak is counted anew.
std::int64_t restart_peak_tensor_bytes();

}  // namespace fedshard::train
