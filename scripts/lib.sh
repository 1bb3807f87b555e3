# What the set-up scripts share: progress lines, and Debian packages without root. Sourced, never run.
# One surprising decision: Debian packages are always resolved with an apt state of our own (.deps/apt), never with the
# system's lists, which may be absent, stale or unreadable for an ordinary user; the system's status file is only read.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps="$root/.deps"
log="$deps/log.txt"
multiarch="$(uname -m)-linux-gnu"
mkdir -p "$deps"

say() { printf 'fedshard: %s\n' "$*"; }
die() {
  printf 'fedshard: error: %s\n' "$*" >&2
  exit 1
}

# step TEXT COMMAND...: runs the command with its output in the log, and prints one line with the time it took. A long
# command says every 30 s that it is still at work. On failure: the end of the log, and the end of the script.
step() {
  local text=$1 began=$SECONDS status ticker
  shift
  (while sleep 30 >/dev/null 2>&1 9>&-; do say "    $text: $((SECONDS - began)) s ..."; done) 9>&- &
  ticker=$!
  printf '\n== %s\n' "$text" >>"$log"
  set +e
  (
    set -e
    "$@"
  ) >>"$log" 2>&1
  status=$?
  set -e
  kill "$ticker" 2>/dev/null && wait "$ticker" 2>/dev/null || true
  if ((status != 0)); then
    say "FAILED after $((SECONDS - began)) s: $text. The end of $log:" >&2
    tail -n 25 "$log" >&2
    exit 1
  fi
  say "$text: done in $((SECONDS - began)) s"
}

has() { command -v "$1" >/dev/null 2>&1; }

# Prints a Clang that has libFuzzer and the sanitizers, or nothing.
fuzz_compiler() {
  local candidate
  for candidate in ${CXX:-} clang++ clang++-{21..14}; do
    if has "$candidate" && printf '#include <concepts>\nextern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }\n' |
      "$candidate" -std=c++20 -fsanitize=fuzzer,address,undefined -x c++ - -o "$deps/probe-fuzz" >/dev/null 2>&1; then
      echo "$candidate"
      return 0
    fi
  done
}

have_apt() { has apt-get && has dpkg-deb && [[ -r /var/lib/dpkg/status ]]; }

# apt-get with a state and a cache of its own. The status file is the system's, or an empty one to see nothing installed.
apt_status=/var/lib/dpkg/status
apt_own=(-o "Dir::State=$deps/apt/state" -o "Dir::Cache=$deps/apt/cache" -o Debug::NoLocking=true -o "APT::Sandbox::User=$(id -un)")
apt_private() { apt-get -q -y "${apt_own[@]}" -o "Dir::State::status=$apt_status" "$@"; }
apt_private_cache() { apt-cache "${apt_own[@]}" "$@"; }

# Package lists, at most an hour old. A third-party source that does not answer is no reason to stop: what matters is
# whether the packages that we ask for are there.
apt_lists() {
  mkdir -p "$deps"/apt/state/lists/partial "$deps"/apt/cache/archives/partial
  if [[ -z $(find "$deps/apt/lists-are-new" -mmin -60 2>/dev/null) ]]; then
    apt_private update || true
    compgen -G "$deps/apt/state/lists/*_Packages*" >/dev/null || {
      echo "apt-get update brought no package list: is the network there?"
      return 1
    }
    touch "$deps/apt/lists-are-new"
  fi
}

# The packages that installing the named ones would bring, one a line, without what every Debian system has in the same
# version (mixing a second C library into a process ends badly).
apt_closure() {
  local plan
  plan=$(apt_private install --simulate --no-install-recommends "$@") || {
    printf '%s\n' "$plan" >&2
    return 1
  }
  awk '$1 == "Inst" { sub(/:.*/, "", $2); print $2 }' <<<"$plan" |
    grep -v -x -E 'libc6|libgcc-s1|libstdc\+\+6|gcc-[0-9]+-base|libcrypt1|debconf|dpkg|tar|perl-base' || true
}

# apt_unpack FOLDER PACKAGE...: downloads exactly these packages and unpacks them below FOLDER. Absolute symbolic links
# that mean a file of the packages themselves are made to point into FOLDER.
apt_unpack() {
  local folder=$1 link target
  shift
  mkdir -p "$folder"
  rm -rf "$deps/apt/debs"
  mkdir -p "$deps/apt/debs"
  (cd "$deps/apt/debs" && apt_private download "$@")
  for deb in "$deps"/apt/debs/*.deb; do dpkg-deb -x "$deb" "$folder"; done
  find "$folder" -type l -lname '/*' -print0 | while IFS= read -r -d '' link; do
    target=$(readlink "$link")
    if [[ $target != "$folder"/* && -e $folder$target ]]; then ln -sfn "$folder$target" "$link"; fi
  done
}
