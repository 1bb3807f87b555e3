#!/usr/bin/env bash
# scripts/fuzz.sh [SECONDS]: builds the fuzzers of tests/fuzz with Clang and runs each for so long (60), from the same
# seed and the inputs of tests/fuzz/corpus. One line each; a finding fails the script, and its input stays in
# build/fuzz/findings. To run one again: build/fuzz/tests/fuzz/fuzz_NAME INPUT. Run after scripts/bootstrap.sh test-all.
# One surprising decision: what a run learns is thrown away, so that a result never hangs on what ran before.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$deps/env.sh"
seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || die "usage: scripts/fuzz.sh [SECONDS], not '$seconds'"
export CXX
CXX=$(fuzz_compiler)
[[ -n $CXX ]] || die "no Clang with libFuzzer here: run scripts/bootstrap.sh test-all, or install clang and libclang-rt-dev"
"$root/scripts/build.sh" fuzz fuzzers

build="$root/build/fuzz"
findings="$build/findings"
mkdir -p "$findings"
passed=0 failed=0
for seeds in "$root"/tests/fuzz/corpus/*/; do
  name=$(basename "$seeds")
  out="$build/$name.log" learned="$build/learned/$name"
  rm -rf "$learned"
  mkdir -p "$learned"
  if "$build/tests/fuzz/fuzz_$name" -seed=1 -max_len=4096 -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 \
    -print_final_stats=1 -artifact_prefix="$findings/$name-" "$learned" "$seeds" >"$out" 2>&1; then
    passed=$((passed + 1))
    say "fuzz_$name: $(awk '$1 == "stat::number_of_executed_units:" { print $2 }' "$out") runs, no finding"
  else
    failed=$((failed + 1))
    say "fuzz_$name: FOUND $(grep -m 1 -o -E 'runtime error:.*|ERROR: .*' "$out" || tail -n 1 "$out")"
    say "    input: $(grep -o -E "$findings/[^ ]*" "$out" | tail -n 1 || echo none); output: $out"
  fi
done
say "fuzzers: $passed passed, $failed failed ($seconds s each)"
((failed == 0))
