# The libraries that the project stands on. Every one is looked up through CMAKE_PREFIX_PATH first, so that modules,
# Spack, conda and the project-local prefix of scripts/bootstrap.sh all work.
find_package(Threads REQUIRED)
# Modules of a cluster often set only what compilers read.
set(fedshard_include_hints ENV CPATH ENV CPLUS_INCLUDE_PATH)
set(fedshard_library_hints ENV LIBRARY_PATH)

# --- torch: cmake/FedshardTorch.cmake, from the Python of the build.
include(FedshardTorch)
set(FEDSHARD_PYTHON "" CACHE FILEPATH "The Python whose torch is used (empty: .venv, then python3)")
if(NOT FEDSHARD_PYTHON)
  if(EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
    set(FEDSHARD_PYTHON "${PROJECT_SOURCE_DIR}/.venv/bin/python" CACHE FILEPATH "" FORCE)
  else()
    find_program(FEDSHARD_PYTHON NAMES python3 REQUIRED)
  endif()
endif()
fedshard_torch_of_python("${FEDSHARD_PYTHON}" FEDSHARD_TORCH FEDSHARD_TORCH_VERSION)
if(NOT FEDSHARD_TORCH)
  message(FATAL_ERROR "${FEDSHARD_PYTHON} has no torch. Run scripts/bootstrap.sh, or give -DFEDSHARD_PYTHON=<python with torch ${FEDSHARD_TORCH_SERIES}>.")
endif()
fedshard_is_supported_torch("${FEDSHARD_TORCH_VERSION}" torch_is_supported)
if(NOT torch_is_supported)
  message(FATAL_ERROR "torch ${FEDSHARD_TORCH_VERSION} (of ${FEDSHARD_PYTHON}) is not supported: fedshard is tested with torch ${FEDSHARD_TORCH_SERIES}. "
                      "Install torch ${FEDSHARD_TORCH_SERIES}.0, or point FEDSHARD_PYTHON at a Python that has it.")
endif()
message(STATUS "torch ${FEDSHARD_TORCH_VERSION} in ${FEDSHARD_TORCH}")
fedshard_make_torch_target("${FEDSHARD_TORCH}")

add_library(torch_headers INTERFACE)
target_compile_definitions(torch_headers INTERFACE USE_C10D_GLOO USE_DISTRIBUTED)
target_link_libraries(torch_headers INTERFACE fedshard::torch)

# --- CUDA: needs a CUDA build of torch, and headers of what that torch runs on, which its wheel brings along as packages.
# OFF unless asked for: most CPU users have a CUDA build of torch too, and this has been compiled but not yet run.
set(FEDSHARD_CUDA OFF CACHE STRING "NCCL and GPUs: ON, OFF, or AUTO (where torch is a CUDA build and the headers are there)")
set_property(CACHE FEDSHARD_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT FEDSHARD_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FEDSHARD_CUDA is '${FEDSHARD_CUDA}'; it can be ON, OFF or AUTO.")
endif()
set(FEDSHARD_HAS_CUDA OFF)
if(NOT FEDSHARD_CUDA STREQUAL "OFF")
  include(Cuda)
endif()

# --- fmt: torch carries it. The torch-free rooms see nothing of torch but this one folder.
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/include-fmt")
file(CREATE_LINK "${FEDSHARD_TORCH}/include/fmt" "${CMAKE_BINARY_DIR}/include-fmt/fmt" SYMBOLIC)
add_library(fmt_headers INTERFACE)
target_include_directories(fmt_headers SYSTEM INTERFACE "${CMAKE_BINARY_DIR}/include-fmt")
target_compile_definitions(fmt_headers INTERFACE FMT_HEADER_ONLY)

# --- Gloo's headers, which the wheels leave out. Never link Debian's libgloo: libtorch_cpu exports its own.
find_path(GLOO_INCLUDE NAMES gloo/config.h HINTS ${fedshard_include_hints} REQUIRED)
add_library(gloo_headers INTERFACE)
target_include_directories(gloo_headers SYSTEM INTERFACE "${GLOO_INCLUDE}")

# --- plain libraries, as imported targets named after what they are.
function(fedshard_find target header library)
  find_path(${target}_INCLUDE NAMES ${header} HINTS ${fedshard_include_hints} REQUIRED)
  add_library(${target} INTERFACE)
  target_include_directories(${target} SYSTEM INTERFACE "${${target}_INCLUDE}")
  if(library)
    find_library(${target}_LIBRARY NAMES ${library} HINTS ${fedshard_library_hints} REQUIRED)
    target_link_libraries(${target} INTERFACE "${${target}_LIBRARY}")
    # A linker with a sysroot (an unpacked compiler, conda's) looks for a library's own libraries nowhere else.
    get_filename_component(folder "${${target}_LIBRARY}" DIRECTORY)
    target_link_options(${target} INTERFACE "-Wl,-rpath-link,${folder}")
  endif()
endfunction()
fedshard_find(cli11 CLI/CLI.hpp "")
fedshard_find(nlohmann_json nlohmann/json.hpp "")
add_library(nlohmann_json::nlohmann_json ALIAS nlohmann_json)
fedshard_find(tomlplusplus toml++/toml.h tomlplusplus)
target_compile_definitions(tomlplusplus INTERFACE TOML_HEADER_ONLY=0)
fedshard_find(simdjson simdjson.h simdjson)
fedshard_find(pcre2 pcre2.h pcre2-8)
target_compile_definitions(pcre2 INTERFACE PCRE2_CODE_UNIT_WIDTH=8)
fedshard_find(xxhash xxhash.h xxhash)
fedshard_find(zmq zmq.hpp zmq)
