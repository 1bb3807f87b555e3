# What `cmake --install` brings: the program, and the engine as a library (docs/library.md): one archive, the public
# headers, and a package for find_package(fedshard). Nothing in the library names a folder of the build.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# As it was linked: torch and the libraries stay where they are, and CMake would take out run paths below the source tree.
install(PROGRAMS "$<TARGET_FILE:fedshard>" DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT program)

# Of the rooms below, the whole; of the others, what works without our launcher and its coordinator.
add_library(fedshard_engine STATIC)
foreach(room base topology model plan comm nn shard optim)
  target_sources(fedshard_engine PRIVATE $<TARGET_OBJECTS:fedshard_${room}>)
endforeach()
target_sources(fedshard_engine PRIVATE
  $<FILTER:$<TARGET_OBJECTS:fedshard_federation>,EXCLUDE,/round\\.cpp\\.>
  $<FILTER:$<TARGET_OBJECTS:fedshard_control>,INCLUDE,/\(host_list|place|ports\)\\.cpp\\.>)
set_target_properties(fedshard_engine PROPERTIES LINKER_LANGUAGE CXX EXPORT_NAME engine)
target_compile_features(fedshard_engine INTERFACE cxx_std_20)
target_include_directories(fedshard_engine INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(fedshard_engine INTERFACE fedshard::torch Threads::Threads)

# A public header includes only public ones, the standard library's, torch's and fmt's (tests/setup/test_library.py).
set(fedshard_public_headers
    base/error.h
    topology/layout.h topology/scheme.h topology/ranges.h
    model/activations.h model/dims.h
    plan/units.h plan/patterns.h plan/freeze.h plan/group_local.h plan/split.h plan/updates.h plan/llama_units.h
    plan/schedule.h plan/check_schedule.h plan/reductions.h plan/memory.h
    plan/outer.h plan/compression.h
    comm/traffic.h comm/transport.h comm/communicator.h comm/axes.h comm/store.h comm/gloo.h comm/loopback.h
    control/place.h control/ports.h
    nn/unit_module.h nn/init.h nn/llama.h
    shard/arena.h shard/flat_buffer.h shard/unit.h shard/state.h shard/engine.h shard/digest.h
    optim/optimizer.h optim/lr_schedule.h
    federation/bucket_line.h federation/exchange.h federation/weights.h federation/guard.h federation/outer.h federation/outer_state.h
    federation/compress.h federation/compressed_exchange.h federation/proximal.h federation/synchronous.h)
foreach(header ${fedshard_public_headers})
  get_filename_component(room "${header}" DIRECTORY)
  install(FILES "${PROJECT_SOURCE_DIR}/fedshard/${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/fedshard/${room}"
          COMPONENT library)
endforeach()

set(fedshard_package "${CMAKE_INSTALL_LIBDIR}/cmake/fedshard")
install(TARGETS fedshard_engine EXPORT fedshardTargets ARCHIVE COMPONENT library)
install(EXPORT fedshardTargets NAMESPACE fedshard:: DESTINATION "${fedshard_package}" COMPONENT library)
configure_package_config_file(cmake/fedshardConfig.cmake.in "${CMAKE_BINARY_DIR}/fedshardConfig.cmake"
                              INSTALL_DESTINATION "${fedshard_package}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/fedshardConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/fedshardConfig.cmake" "${CMAKE_BINARY_DIR}/fedshardConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/FedshardTorch.cmake"
        DESTINATION "${fedshard_package}" COMPONENT library)
