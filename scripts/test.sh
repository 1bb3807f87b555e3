#!/usr/bin/env bash
# scripts/test.sh [all]: builds build/release and runs the unit tests, then every pytest file under tests/ against that
# build. Both always run; a failure of either is the script's. `all` adds the unit tests under the address,
# undefined-behaviour and thread sanitizers, the fuzzers, and more cases of each property test (FEDSHARD_TEST_SCALE=long).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$deps/env.sh"
scale=${1:-}
[[ -z $scale || $scale == all ]] || die "usage: scripts/test.sh [all], not '$scale'"
if [[ $scale == all ]]; then export FEDSHARD_TEST_SCALE=long; fi

# A sanitizer's finding is a failure, never just a line in the output.
supp="$root/tests/sanitizers"
export ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1"
export LSAN_OPTIONS="suppressions=$supp/lsan.supp:print_suppressions=0"
export UBSAN_OPTIONS="print_stacktrace=1"
export TSAN_OPTIONS="suppressions=$supp/tsan.supp:halt_on_error=1:second_deadlock_stack=1"

failed=0
summary=()
run() { # NAME COMMAND...: prints the output as it comes and keeps the closing line for the summary
  local name=$1 out="$deps/test-$1.log" status=0 closing
  shift
  say "$name: $*"
  "$@" 2>&1 | tee "$out" || status=$?
  ((status == 0)) || failed=1
  closing=$(grep -E '% tests passed|[0-9]+ (passed|failed|error)|no tests ran|No tests were found' "$out" | tail -n 1) || closing="no closing line"
  summary+=("$name: $closing (status $status)")
}

unit_tests() { # PRESET
  if "$root/scripts/build.sh" "$1"; then
    run "ctest-$1" ctest --test-dir "$root/build/$1" --output-on-failure --no-tests=error -j2
  else
    failed=1
    summary+=("build-$1: failed")
  fi
}

cd "$root"
unit_tests release
if [[ $scale == all ]]; then
  unit_tests asan
  OMP_NUM_THREADS=1 unit_tests tsan # the barriers of libgomp are invisible to the thread sanitizer
  run fuzz "$root/scripts/fuzz.sh"
fi
export FEDSHARD_BUILD="$root/build/release"
run pytest "$root/.venv/bin/python" -m pytest -q -ra "$root/tests"

say "summary"
printf '%s\n' "${summary[@]}"
exit "$failed"
