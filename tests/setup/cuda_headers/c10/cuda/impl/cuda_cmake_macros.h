// What torch's build writes into a CUDA wheel and the CPU wheel lacks: libc10_cuda is a shared library.
#pragma once
#define C10_CUDA_BUILD_SHARED_LIBS
