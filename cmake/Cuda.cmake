# What comm/nccl.cpp is compiled against and linked with; sets FEDSHARD_HAS_CUDA. No CUDA compiler is needed: there are
# no kernels of ours. torch's headers name those of cuBLAS and its like, although nothing of them is called.
set(cuda_missing "")
if(NOT EXISTS "${FEDSHARD_TORCH}/lib/libtorch_cuda.so")
  list(APPEND cuda_missing "CUDA build of torch (this is ${FEDSHARD_TORCH_VERSION})")
endif()
get_filename_component(site_packages "${FEDSHARD_TORCH}" DIRECTORY)
file(GLOB wheel_includes "${site_packages}/nvidia/*/include")
set(cuda_includes "")
foreach(header cuda_runtime_api.h cublas_v2.h cublasLt.h cusparse.h cusolverDn.h nccl.h)
  string(MAKE_C_IDENTIFIER "CUDA_INCLUDE_${header}" variable)
  find_path(${variable} NAMES ${header} HINTS ${wheel_includes} ${fedshard_include_hints} ENV CUDA_HOME
            PATHS /usr/local/cuda PATH_SUFFIXES include)
  mark_as_advanced(${variable})
  if(${variable})
    list(APPEND cuda_includes "${${variable}}")
  else()
    list(APPEND cuda_missing "${header}")
  endif()
endforeach()

if(cuda_missing)
  list(JOIN cuda_missing ", " cuda_missing)
  if(FEDSHARD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FEDSHARD_CUDA=ON, but there is no ${cuda_missing} here. Use a CUDA build of torch 2.13 with the "
                        "packages it depends on, or set CUDA_HOME; docs/install.md says more.")
  endif()
  message(STATUS "CUDA: off; there is no ${cuda_missing}")
  return()
endif()

set(FEDSHARD_HAS_CUDA ON)
list(REMOVE_DUPLICATES cuda_includes)
message(STATUS "CUDA: on; headers in ${cuda_includes}")
add_library(torch_cuda_headers INTERFACE)
target_include_directories(torch_cuda_headers SYSTEM INTERFACE ${cuda_includes})
foreach(lib c10_cuda torch_cuda)
  add_library(${lib} SHARED IMPORTED)
  set_target_properties(${lib} PROPERTIES IMPORTED_LOCATION "${FEDSHARD_TORCH}/lib/lib${lib}.so")
  target_link_libraries(torch_cuda_headers INTERFACE ${lib})
endforeach()
# Alone: c10d's header is empty without this name, and a precompiled header does not know it.
set_source_files_properties("${PROJECT_SOURCE_DIR}/fedshard/comm/nccl.cpp" PROPERTIES
                            SKIP_PRECOMPILE_HEADERS ON COMPILE_DEFINITIONS USE_C10D_NCCL)
# torch_cuda needs the packages' libraries in turn; it finds them at run time, a linker does not.
target_link_options(torch_cuda_headers INTERFACE -Wl,--allow-shlib-undefined)
