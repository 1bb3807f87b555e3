# The machine files of examples/machines, in the program under their names: one generated source of the room config.
file(GLOB machine_files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/machines/*.toml")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${machine_files})
set(entries "")
foreach(file ${machine_files})
  get_filename_component(name "${file}" NAME_WE)
  file(READ "${file}" text)
  string(APPEND entries "      {\"${name}\", R\"toml(${text})toml\"},\n")
endforeach()
set(FEDSHARD_MACHINES_SOURCE "${CMAKE_BINARY_DIR}/builtin_machines.cpp")
file(CONFIGURE OUTPUT "${FEDSHARD_MACHINES_SOURCE}" @ONLY CONTENT
"#include \"fedshard/config/machine_file.h\"

namespace fedshard::config {

const std::map<std::string, std::string_view>& builtin_machines() {
  static const std::map<std::string, std::string_view> machines = {
@entries@  };
  return machines;
}

}  // namespace fedshard::config
")
