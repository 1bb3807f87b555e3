#!/usr/bin/env bash
# scripts/build.sh PRESET [TARGET...]: configures build/PRESET and builds the targets there (none: everything, with tests).
# Run after scripts/bootstrap.sh. As many compilers at once as cores and memory allow: a file that sees all of torch takes
# up to 2 GB, so the core count alone would swap a small machine to a halt.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$deps/env.sh"
preset=${1:?usage: scripts/build.sh PRESET [TARGET...]}
shift
build="$root/build/$preset"

options=()
if (($# == 0)); then
  options+=(-DFEDSHARD_TESTS=ON)
elif [[ ! -f $build/CMakeCache.txt ]]; then
  options+=(-DFEDSHARD_TESTS=OFF) # the test library need not be there
fi
memory_gb=$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)
jobs=$(nproc)
if ((memory_gb / 2 < jobs)); then jobs=$((memory_gb < 4 ? 1 : memory_gb / 2)); fi

began=$SECONDS
cd "$root"
cmake --preset "$preset" "${options[@]}" >"$deps/configure.log" 2>&1 || {
  cat "$deps/configure.log" >&2
  die "cmake --preset $preset failed (its output is above)"
}
say "compiling build/$preset with $jobs jobs"
cmake --build "$build" --parallel "$jobs" ${@:+--target "$@"}
say "build/$preset: done in $((SECONDS - began)) s"
