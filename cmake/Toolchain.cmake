# Warnings, sanitizers and the compiler cache, for our own targets only.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1")
if(FEDSHARD_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g1")  # better stack traces, and a third less to compile
endif()
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -g -D_GLIBCXX_ASSERTIONS")

find_program(CCACHE ccache)
if(CCACHE)
  # A precompiled header is only cacheable when ccache hashes the preprocessed text and forgives its time stamps.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
endif()

add_library(fedshard_options INTERFACE)
target_include_directories(fedshard_options INTERFACE "${PROJECT_SOURCE_DIR}")
target_compile_options(fedshard_options INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual)
# Position-independent everywhere, by one flag: libraries and executables share a precompiled header.
target_compile_options(fedshard_options INTERFACE -fPIC)
if(CCACHE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(fedshard_options INTERFACE -fpch-preprocess)
endif()
if(FEDSHARD_WERROR)
  target_compile_options(fedshard_options INTERFACE -Werror)
endif()
if(FEDSHARD_SANITIZE)
  foreach(kind ${FEDSHARD_SANITIZE})
    target_compile_options(fedshard_options INTERFACE -fsanitize=${kind})
    target_link_options(fedshard_options INTERFACE -fsanitize=${kind})
  endforeach()
  if("thread" IN_LIST FEDSHARD_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC warns of each fence that the sanitizer cannot see; LibTorch's headers have some.
    target_compile_options(fedshard_options INTERFACE -Wno-tsan)
  endif()
  # Without the second option undefined behaviour is printed and the test passes.
  target_compile_options(fedshard_options INTERFACE -fno-omit-frame-pointer -fno-sanitize-recover=all)
endif()

# The old kind of run path holds for the libraries' own needs too: a libzmq in a prefix finds the libsodium beside it,
# and the program runs from any folder without LD_LIBRARY_PATH.
target_link_options(fedshard_options INTERFACE -Wl,--disable-new-dtags)
