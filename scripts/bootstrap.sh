#!/usr/bin/env bash
# scripts/bootstrap.sh [build|demo|test|test-all]: finds what fedshard needs, brings only what is missing, and writes .deps/env.sh
# for the other scripts. Nothing outside the working tree is touched, except by apt-get where we are root or may use sudo.
# One surprising decision: .venv always exists. Where the active Python already has torch 2.13, .venv borrows that torch
# through one .pth line, so that test packages never go into somebody else's environment.
#
# Environment: CMAKE_PREFIX_PATH, CPATH, LIBRARY_PATH, PKG_CONFIG_PATH  where libraries are looked for (modules, Spack, conda)
#              CXX                     the compiler (C++20)
#              FEDSHARD_PYTHON         the Python whose torch 2.13 is to be used
#              FEDSHARD_FORCE_LOCAL=1  do as an unprivileged user on a machine without the libraries would
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

torch_version=2.13.0
mode=${1:-build}
[[ $mode =~ ^(build|demo|test|test-all)$ ]] || die "usage: scripts/bootstrap.sh [build|demo|test|test-all], not '$mode'"
force_local=${FEDSHARD_FORCE_LOCAL:-}
began=$SECONDS

exec 9>"$deps/lock" # two `make` at once: the second waits
has flock && { flock -n 9 || { say "waiting for another bootstrap" && flock 9; }; }
: >"$log"

# header, library (or -), pkg-config name (or -), Debian package
libraries=(
  "CLI/CLI.hpp         -           -             libcli11-dev"
  "toml++/toml.h       tomlplusplus tomlplusplus libtomlplusplus-dev"
  "nlohmann/json.hpp   -           nlohmann_json nlohmann-json3-dev"
  "simdjson.h          simdjson    simdjson      libsimdjson-dev"
  "pcre2.h             pcre2-8     libpcre2-8    libpcre2-dev"
  "xxhash.h            xxhash      libxxhash     libxxhash-dev"
  "zmq.h               zmq         libzmq        libzmq3-dev"
  "zmq.hpp             -           -             cppzmq-dev"
  "gloo/config.h       -           -             libgloo-dev"
)
[[ $mode == test* ]] && libraries+=("gtest/gtest.h gtest gtest libgtest-dev")

# --- Finding. Everything here is quick; nothing is cached, so that a changed environment is seen at once.

works_as_compiler() { # compiles and links a small C++20 program: a compiler without its linker is none
  has "$1" && printf '#include <concepts>\n#include <span>\n#include <stop_token>\nint main() { return !std::integral<int>; }\n' |
    "$1" -std=c++20 -x c++ - -o "$deps/probe" >/dev/null 2>&1 && "$deps/probe"
}

find_compiler() {
  local candidate
  for candidate in ${CXX:-} c++ g++ g++-14 g++-13 g++-12 g++-11 clang++ "$deps/bin/g++"; do
    if works_as_compiler "$candidate"; then compiler=$candidate && return 0; fi
    [[ $candidate != "${CXX:-}" ]] || die "CXX=$CXX does not compile C++20: set CXX to g++ 11 or later, or unset it"
  done
  compiler=
}

new_enough_cmake() {
  local version
  version=$("$1" --version 2>/dev/null | awk 'NR == 1 { print $3 }') || return 1
  [[ $version =~ ^([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] > 3 || (BASH_REMATCH[1] == 3 && BASH_REMATCH[2] >= 22)))
}

# Fills `include_dirs` and `library_dirs`, in the order in which CMake looks.
collect_dirs() {
  local prefix name prefixes=() fields
  IFS=: read -r -a prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  IFS=: read -r -a include_dirs <<<"${CPATH:-}:${CPLUS_INCLUDE_PATH:-}"
  IFS=: read -r -a library_dirs <<<"${LIBRARY_PATH:-}"
  prefixes+=("$deps/usr")
  # With a compiler of our own in .deps the system's headers are out of reach, and are not searched.
  if [[ -z $force_local && $compiler != "$deps"/* ]]; then
    prefixes+=(/usr/local /usr)
    if has pkg-config; then
      for fields in "${libraries[@]}"; do
        read -r _ _ name _ <<<"$fields"
        prefix=$([[ $name == - ]] || pkg-config --variable=prefix "$name" 2>/dev/null) || true
        if [[ -n $prefix && " ${prefixes[*]} " != *" $prefix "* ]]; then
          prefixes+=("$prefix") extra_prefixes+=("$prefix")
        fi
      done
    fi
  fi
  for prefix in "${prefixes[@]}"; do
    [[ -n $prefix ]] || continue
    include_dirs+=("$prefix/include" "$prefix/include/$multiarch")
    library_dirs+=("$prefix/lib" "$prefix/lib64" "$prefix/lib/$multiarch")
  done
}

is_file_in() { # NAME FOLDER...
  local name=$1 folder
  shift
  for folder in "$@"; do [[ -n $folder && -e $folder/$name ]] && return 0; done
  return 1
}

# Fills `missing` with "header library Debian-package" lines.
find_libraries() {
  local header library package fields
  extra_prefixes=()
  collect_dirs
  for fields in "${libraries[@]}"; do
    read -r header library _ package <<<"$fields"
    if ! is_file_in "$header" "${include_dirs[@]}" || { [[ $library != - ]] &&
      ! is_file_in "lib$library.so" "${library_dirs[@]}" && ! is_file_in "lib$library.a" "${library_dirs[@]}"; }; then
      missing+=("$header $library $package")
    fi
  done
}

# probe PYTHON: "3.11 <base interpreter> <torch version or none> <folder that holds torch>"
probe() {
  "$1" - <<'PY' 2>/dev/null
import importlib.metadata as m, os, sys
try:
    d = m.distribution("torch")
    version, folder = d.version, os.path.realpath(d.locate_file(""))
except m.PackageNotFoundError:
    version, folder = "none", "-"
base = getattr(sys, "_base_executable", None) or sys.executable
print("%d.%d" % sys.version_info[:2], base, version, folder, sep="\t")
PY
}

supported_python() { [[ $1 =~ ^3\.1[0-4]$ ]]; }

# Sets `python` (the interpreter that makes .venv) and `borrowed` (the folder of a torch to borrow, or nothing).
find_python() {
  local candidate report version base torch folder
  python='' borrowed=''
  for candidate in ${FEDSHARD_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    report=$(probe "$candidate") || {
      [[ -z ${FEDSHARD_PYTHON:-} ]] || die "FEDSHARD_PYTHON=$FEDSHARD_PYTHON does not run"
      continue
    }
    IFS=$'\t' read -r version base torch folder <<<"$report"
    if [[ $folder == "$root/.venv"/* ]]; then torch=none; fi # our own .venv is active
    if [[ $torch == 2.13.* ]] && supported_python "$version"; then
      python=$(command -v "$candidate") borrowed=$folder
      return
    fi
    [[ -z ${FEDSHARD_PYTHON:-} ]] ||
      die "FEDSHARD_PYTHON=$FEDSHARD_PYTHON is Python $version with torch $torch; fedshard needs Python 3.10 to 3.14 with torch 2.13"
    if [[ $torch != none && $torch != 2.13.* ]]; then
      say "warning: torch $torch of $(command -v "$candidate") is not used: fedshard is tested with torch 2.13; .venv gets $torch_version"
    fi
    if [[ -z $python ]] && supported_python "$version"; then python=$base; fi
  done
}

# --- Bringing what is missing.

privilege() { # how apt-get may install: "" (as root), "sudo -n", or "none"
  if [[ -n $force_local ]] || ! has apt-get; then
    echo none
  elif [[ $(id -u) == 0 ]]; then
    echo ""
  elif has sudo && sudo -n true 2>/dev/null; then
    echo "sudo -n"
  else
    echo none
  fi
}

install_packages() { # PRIVILEGE PACKAGE...; the privilege is split into words
  local as=$1
  shift
  $as apt-get -q -o DPkg::Lock::Timeout=300 update || true
  $as env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"
}

# Unpacks the named packages (whose headers are all that is used) and those of the libraries in `missing` with what they
# need at run time. Development packages that these name in turn bring headers of the C library and of much else that
# would hide the compiler's own; they are left out.
unpack_libraries() {
  local packages=("$@") line closure with_needs=()
  apt_lists
  if [[ -n $force_local ]]; then
    apt_status="$deps/apt/nothing-installed"
    : >"$apt_status"
  fi
  for line in "${missing[@]}"; do
    packages+=("${line##* }")
    [[ $line == *" - "* ]] || with_needs+=("${line##* }")
  done
  if ((${#with_needs[@]})); then
    closure=$(apt_closure "${with_needs[@]}")
    packages+=($(grep -v -e '-dev$' <<<"$closure"))
  fi
  apt_unpack "$deps" $(printf '%s\n' "${packages[@]}" | sort -u)
  # Some packages put their libraries below /lib; programs get one folder to look in.
  find "$deps/lib/$multiarch" -name '*.so*' -exec ln -sfn -t "$deps/usr/lib/$multiarch" {} + 2>/dev/null || true
}

# Libraries that unpacked tools run on, in a folder of their own apart from the C library: a loader and a C library of
# two builds do not mix.
link_tool_libraries() {
  local tc="$deps/toolchain" c_library file
  c_library=$(for file in "$deps"/apt/debs/libc6_*.deb; do [[ ! -e $file ]] || dpkg-deb --fsys-tarfile "$file" | tar -t; done)
  mkdir -p "$tc/runtime"
  for file in "$tc/usr/lib/$multiarch"/lib*.so*; do
    if [[ $c_library != *"/${file##*/}"* && $(head -c 4 "$file") == $'\x7fELF' ]]; then ln -sfn "$file" "$tc/runtime/"; fi
  done
}

write_tool() { # NAME OPTIONS: a wrapper in .deps/bin that tells an unpacked tool where its libraries and helpers are
  local tc="$deps/toolchain"
  mkdir -p "$deps/bin"
  cat >"$deps/bin/$1" <<WRAPPER
#!/bin/sh
LD_LIBRARY_PATH="$tc/runtime\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" PATH="$tc/usr/bin:\$PATH"
export LD_LIBRARY_PATH PATH
exec "$tc/usr/bin/$1" $2 "\$@"
WRAPPER
  chmod +x "$deps/bin/$1"
}

# A whole compiler below .deps/toolchain, which is its own sysroot: it needs the C library's files for linking even
# where the same library runs the system, so these are fetched in any case. Programs that it links run on the system's.
unpack_toolchain() {
  local tc="$deps/toolchain" tool file options closure
  apt_lists
  closure=$(apt_closure g++)
  apt_unpack "$tc" $closure libc6 libgcc-s1 libstdc++6
  link_tool_libraries
  mkdir -p "$deps/usr/lib/$multiarch"
  for file in "$tc/usr/lib/$multiarch"/lib{asan,tsan,ubsan}.so.*; do ln -sfn "$file" "$deps/usr/lib/$multiarch/"; done
  for tool in gcc g++ ar ranlib nm ld strip objcopy objdump readelf addr2line; do
    options=
    [[ $tool != g* ]] || options="--sysroot='$tc' -Wl,-rpath-link,/usr/lib/$multiarch:/lib/$multiarch"
    write_tool "$tool" "$options"
  done
  works_as_compiler "$deps/bin/g++"
}

# Clang for the fuzzers, beside our own g++ and on its headers, or on those of the system's.
unpack_clang() {
  local tc="$deps/toolchain" closure options=
  apt_lists
  closure=$(apt_closure clang libclang-rt-dev)
  apt_unpack "$tc" $closure libc6
  link_tool_libraries
  if [[ -x $deps/bin/g++ ]]; then
    options="--sysroot='$tc' --gcc-toolchain='$tc/usr' -Wl,-rpath-link,/usr/lib/$multiarch:/lib/$multiarch"
  fi
  write_tool clang "$options"
  write_tool clang++ "$options"
  [[ -n $(PATH="$deps/bin:$PATH" fuzz_compiler) ]]
}

needs_clang() { [[ $mode == test-all && -z $(PATH="$deps/bin:$PATH" fuzz_compiler) ]]; } # for the fuzzers alone

install_as() { # PRIVILEGE
  local wanted=() line
  for line in "${missing[@]}"; do wanted+=("${line##* }"); done
  [[ -n $compiler ]] || wanted+=(g++)
  [[ -n $cmake ]] || wanted+=(cmake)
  [[ -n $ninja ]] || wanted+=(ninja-build)
  [[ -n $python ]] || wanted+=(python3)
  [[ -n $pip_ready ]] || wanted+=(python3-venv)
  ! needs_clang || wanted+=(clang libclang-rt-dev)
  ((${#wanted[@]})) || return 0
  step "apt-get install ${wanted[*]}" install_packages "$1" "${wanted[@]}"
}

unpack_without_root() {
  local alone=() what=()
  [[ -n $python ]] || die "no Python 3.10 to 3.14: install python3, or set FEDSHARD_PYTHON"
  [[ -n $pip_ready ]] || alone+=(python3-pip-whl)
  what=("${missing[@]%% *}" "${alone[@]}")
  [[ -n $compiler ]] || what+=("a C++20 compiler")
  ! needs_clang || what+=("Clang with libFuzzer")
  ((${#what[@]})) || return 0
  have_apt || die "missing, and no apt-get here to bring them: $(printf '%s, ' "${what[@]}")\
load or install them (modules, Spack, conda) and name their folders in CMAKE_PREFIX_PATH; see docs/install.md"
  [[ -n $compiler ]] || step "unpack a compiler into .deps/toolchain (no root)" unpack_toolchain
  ! needs_clang || step "unpack Clang into .deps/toolchain (no root)" unpack_clang
  if ((${#missing[@]} + ${#alone[@]})); then
    step "unpack $(printf '%s ' "${missing[@]##* }" "${alone[@]}")into .deps (no root)" unpack_libraries "${alone[@]}"
  fi
}

bring_system_packages() {
  local as
  as=$(privilege)
  if [[ $as == none ]]; then unpack_without_root; else install_as "$as"; fi
}

make_venv() {
  rm -rf "$root/.venv"
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$root/.venv"
  else # Debian without python3-venv: pip itself is a wheel that can be run
    "$python" -m venv --without-pip "$root/.venv"
    local wheel
    wheel=$(ls "$deps"/usr/share/python-wheels/pip-*.whl)
    "$root/.venv/bin/python" "$wheel/pip" install --no-index "$wheel"
  fi
  if [[ -n $borrowed ]]; then
    echo "$borrowed" >"$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed_torch.pth"
  fi
}

pip_install() { "$root/.venv/bin/python" -m pip install --disable-pip-version-check "$@"; }

torch_of_venv() {
  local report
  [[ -x $root/.venv/bin/python ]] && report=$(probe "$root/.venv/bin/python") && cut -f 3,4 <<<"$report"
}

bring_torch() {
  local version folder
  IFS=$'\t' read -r version folder <<<"$(torch_of_venv)" || true
  # A set FEDSHARD_PYTHON is an order; an active environment is an offer that an existing .venv need not take.
  if [[ $version != 2.13.* || (-n ${FEDSHARD_PYTHON:-} && $folder != "$borrowed") ]]; then
    if [[ ! -x $root/.venv/bin/python || -n $borrowed ]] || ! "$root/.venv/bin/python" -m pip --version >/dev/null 2>&1; then
      step "make .venv with $python" make_venv
    fi
    if [[ -z $borrowed ]]; then
      step "pip install torch==$torch_version into .venv (0.2 GB for a CPU build, some 3 GB for a CUDA build)" \
        pip_install "torch==$torch_version"
    fi
    IFS=$'\t' read -r version folder <<<"$(torch_of_venv)" || true
    [[ $version == 2.13.* ]] || die "$root/.venv has torch '$version' after the set-up; remove .venv and try again"
  fi
  torch_found="torch $version in $folder"
  torch_installed=$version
}

bring_test_requirements() {
  local key
  key=$(cat "$root/tests/requirements.txt" <(echo "$torch_installed") | sha256sum)
  [[ -f $root/.venv/requirements-key && $(<"$root/.venv/requirements-key") == "$key" ]] && return 0
  echo "torch==$torch_installed" >"$deps/constraints.txt" # nothing here may bring another torch
  step "pip install tests/requirements.txt into .venv" pip_install -r "$root/tests/requirements.txt" -c "$deps/constraints.txt"
  echo "$key" >"$root/.venv/requirements-key"
}

bring_cmake() { # without root, from pip: Debian's cmake hangs on some twenty libraries
  local tools=() tool
  [[ -n $cmake ]] || tools+=(cmake==3.31.10)
  [[ -n $ninja ]] || tools+=(ninja==1.13.0)
  ((${#tools[@]})) || return 0
  step "pip install ${tools[*]} into .venv" pip_install "${tools[@]}"
  mkdir -p "$deps/bin"
  for tool in cmake ctest ninja; do
    if [[ -x $root/.venv/bin/$tool ]]; then ln -sfn "$root/.venv/bin/$tool" "$deps/bin/$tool"; fi
  done
}

write_env() {
  local prefixes="$deps/usr" prefix
  for prefix in ${extra_prefixes[@]+"${extra_prefixes[@]}"}; do prefixes+=":$prefix"; done
  {
    echo "# Written by scripts/bootstrap.sh; sourced by the other scripts."
    echo "export PATH=\"$deps/bin:\$PATH\""
    echo "export CMAKE_PREFIX_PATH=\"\${CMAKE_PREFIX_PATH:+\$CMAKE_PREFIX_PATH:}$prefixes\""
    echo "export CMAKE_LIBRARY_PATH=\"\${CMAKE_LIBRARY_PATH:+\$CMAKE_LIBRARY_PATH:}$deps/usr/lib/$multiarch\""
    echo "export CXX=\"\${CXX:-$compiler}\""
    [[ $compiler != "$deps"/* ]] || echo "export CC=\"$deps/bin/gcc\""
  } >"$deps/env.sh"
}

find_tools() {
  find_compiler
  cmake=$(PATH="$deps/bin:$PATH" command -v cmake) && new_enough_cmake "$cmake" || cmake=
  ninja=$(PATH="$deps/bin:$PATH" command -v ninja) && "$ninja" --version >/dev/null 2>&1 || ninja=
  missing=()
  find_libraries
}

find_tools
find_python
pip_ready=
if [[ -x $root/.venv/bin/python ]] || { [[ -n $python ]] && "$python" -c 'import ensurepip' 2>/dev/null; } ||
  compgen -G "$deps/usr/share/python-wheels/pip-*.whl" >/dev/null; then
  pip_ready=yes
fi
bring_system_packages
[[ -n $python ]] || find_python
bring_torch
find_tools
bring_cmake
((${#missing[@]} == 0)) || die "still missing after the set-up: ${missing[*]}. See $log"
[[ $mode != test* ]] || bring_test_requirements
write_env
say "ready to $mode: $compiler, $torch_found ($((SECONDS - began)) s)"
