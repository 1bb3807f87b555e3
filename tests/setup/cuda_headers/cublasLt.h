// See cublas_v2.h beside this file.
#pragma once
typedef struct cublasLtContext* cublasLtHandle_t;
