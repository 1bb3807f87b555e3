# torch as one target, fedshard::torch: torch_cpu, c10 and the headers that come with them, fmt's among them. The build
# and the installed package (fedshardConfig.cmake) both stand on this file.
#
# PyTorch's own package is not asked: it wants a CUDA toolkit whenever the wheel was built for CUDA, even where only the
# CPU side is linked. Its targets may exist beside ours.
set(FEDSHARD_TORCH_SERIES "2.13")

# The folder and the version of the torch that `python` imports; both empty where it has none.
function(fedshard_torch_of_python python folder version)
  set(ask "import importlib.util as u, importlib.metadata as m
print(u.find_spec('torch').submodule_search_locations[0]); print(m.version('torch'))")
  execute_process(COMMAND "${python}" -c "${ask}" OUTPUT_VARIABLE report RESULT_VARIABLE status ERROR_QUIET
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(${folder} "" PARENT_SCOPE)
  set(${version} "" PARENT_SCOPE)
  if(status EQUAL 0 AND report MATCHES "^(.*)\n(.*)$")
    set(${folder} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    set(${version} "${CMAKE_MATCH_2}" PARENT_SCOPE)
  endif()
endfunction()

# "2.13.0" of a LibTorch in `folder`, read from its headers; empty where there is none.
function(fedshard_torch_version folder version)
  set(header "${folder}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${header}")  # of versions before 2.9
    set(header "${folder}/include/torch/csrc/api/include/torch/version.h")
  endif()
  set(found "")
  if(EXISTS "${header}")
    foreach(part MAJOR MINOR PATCH)
      file(STRINGS "${header}" line REGEX "^#define TORCH_VERSION_${part} ")
      string(REGEX MATCH "[0-9]+$" number "${line}")
      list(APPEND found "${number}")
    endforeach()
    list(JOIN found "." found)
  endif()
  set(${version} "${found}" PARENT_SCOPE)
endfunction()

# Whether the version ("2.13.0+cpu") is of the series that fedshard is tested with.
function(fedshard_is_supported_torch version answer)
  string(FIND "${version}" "${FEDSHARD_TORCH_SERIES}." place)
  if(place EQUAL 0)
    set(${answer} TRUE PARENT_SCOPE)
  else()
    set(${answer} FALSE PARENT_SCOPE)
  endif()
endfunction()

# Makes fedshard::torch of the LibTorch in `folder`.
function(fedshard_make_torch_target folder)
  foreach(lib c10 torch_cpu)
    add_library(fedshard::${lib} SHARED IMPORTED)
    set_target_properties(fedshard::${lib} PROPERTIES IMPORTED_LOCATION "${folder}/lib/lib${lib}.so")
  endforeach()
  add_library(fedshard::torch INTERFACE IMPORTED)
  set_target_properties(fedshard::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${folder}/include;${folder}/include/torch/csrc/api/include"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${folder}/include;${folder}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "FMT_HEADER_ONLY"
    INTERFACE_LINK_LIBRARIES "fedshard::torch_cpu;fedshard::c10")
endfunction()
