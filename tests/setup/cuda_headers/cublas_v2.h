// The names of cuBLAS that torch's headers mention. For compiling, never for linking or running, with a CUDA toolkit
// that was installed without its mathematical libraries; fedshard itself calls none of them.
#pragma once
typedef struct cublasContext* cublasHandle_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
