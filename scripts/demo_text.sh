#!/usr/bin/env bash
# scripts/demo_text.sh OUT_DIR: real English text for the demo, as OUT_DIR/train/*.jsonl and OUT_DIR/eval/*.jsonl (one
# document a record; about 2 % held out). TEXT=folder takes the *.txt and *.md files below that folder instead.
# One surprising decision: the text comes from Debian packages that are unpacked, never installed: Python's manual,
# WordNet's glosses and git's manual pages, three kinds of prose under free licences. Where there is no apt, Python's own
# help texts do. The text stays out of the repository.
set -euo pipefail
out=${1:?usage: scripts/demo_text.sh OUT_DIR}
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
python="$root/.venv/bin/python"
[[ -x $python ]] || die "run scripts/bootstrap.sh demo first"
mkdir -p "$out"
out=$(cd "$out" && pwd)
raw="$out/packages"

if [[ -n ${TEXT:-} ]]; then
  [[ -d $TEXT ]] || die "TEXT=$TEXT is not a folder"
  TEXT=$(cd "$TEXT" && pwd)
  source="folder $TEXT"
elif have_apt; then
  source="Debian packages"
else
  source="Python's help texts"
fi
if [[ -z ${TEXT:-} && -f $out/source && $(<"$out/source") == "$source" ]]; then
  say "demo text: already in $out ($source)"
  exit 0
fi
rm -rf "$out/source" "$out/train" "$out/eval"

fetch_packages() {
  apt_lists
  local manual
  manual=$(apt_private_cache pkgnames python3. | grep -x 'python3\.[0-9]*-doc' | sort -t . -k 2 -n | tail -n 1)
  [[ -n $manual ]] || {
    echo "no package python3.N-doc in this release"
    return 1
  }
  rm -rf "$raw"
  apt_unpack "$raw/manual" "$manual"
  apt_unpack "$raw/glosses" wordnet-base
  apt_unpack "$raw/git" git-doc
}

split() { "$python" "$root/scripts/demo_split.py" "$out" "$@"; }
case $source in
folder*)
  split "own=$TEXT"
  ;;
Debian*)
  step "demo text: download and unpack three packages (21 MB)" fetch_packages
  split "manual=$raw/manual" "glosses=$raw/glosses" "git=$raw/git"
  rm -rf "$raw"
  ;;
*)
  say "demo text: no apt here, so Python's own help texts it is (0.5 MB); TEXT=folder takes yours"
  split "help=$("$python" -c 'import pydoc_data; print(pydoc_data.__path__[0])')"
  ;;
esac
echo "$source" >"$out/source"
