"""The tree itself: file lengths, no umbrella include of torch, links in the docs, no paths of anybody's machine."""
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 400
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A path at the root that only one machine has. The pieces are joined here so that this file passes its own check.
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + r"me/\w+"]) + r")(?:/|\b)")
SKIPPED = {".git", "build", ".venv", ".deps", ".cache", "runs", "__pycache__", ".pytest_cache"}


def tracked_files():
    """What git tracks and what it would add; without git (an unpacked archive), all but what .gitignore leaves out."""
    git = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode == 0:
        names = [ROOT / name for name in git.stdout.splitlines()]
    else:
        names = [p for p in ROOT.rglob("*") if not SKIPPED.intersection(p.relative_to(ROOT).parts)]
    return [p for p in names if p.is_file()]


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def broken_links(folder, text):
    """Relative links of a Markdown text that lead nowhere. Links to the web and within the page are not followed."""
    targets = [t.split("#")[0] for t in LINK.findall(without_code(text))]
    return [t for t in targets if t and not re.match(r"^[a-z]+:", t) and not (folder / t).exists()]


def machine_paths(text):
    return [line.strip() for line in text.splitlines() if MACHINE_PATH.search(line)]


def test_files_are_short():
    long = {str(p.relative_to(ROOT)): n for p in (ROOT / "fedshard").rglob("*")
            if p.suffix in (".h", ".cpp") and (n := len(p.read_text().splitlines())) > MOST_LINES}
    assert long == {}


def test_headers_are_guarded():
    bare = [str(p.relative_to(ROOT)) for p in (ROOT / "fedshard").rglob("*.h") if "#pragma once\n" not in p.read_text()]
    assert bare == []


def test_no_umbrella_include():
    umbrella = re.compile(r"#\s*include\s*[<\"]torch/(torch|extension|all)\.h")
    found = [str(p.relative_to(ROOT)) for folder in ("fedshard", "tests", "cmake") for p in (ROOT / folder).rglob("*")
             if p.suffix in (".h", ".cpp") and umbrella.search(p.read_text())]
    assert found == []


def test_links_resolve():
    broken = {str(p.relative_to(ROOT)): bad for p in tracked_files() if p.suffix == ".md"
              and (bad := broken_links(p.parent, p.read_text()))}
    assert broken == {}


def test_no_machine_paths():
    found = {}
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if lines := machine_paths(text):
            found[str(path.relative_to(ROOT))] = lines
    assert found == {}


def test_the_checks_can_fail(tmp_path):
    (tmp_path / "here.md").write_text("x")
    text = "[a](here.md) [b](gone.md) [c](here.md#part) [d](#part) [e](https://x.org/y) `[f](code.md)`"
    assert broken_links(tmp_path, text) == ["gone.md"]
    for bad in ["see /wo" + "rk/main", "cd /ro" + "ot", '"/ho' + 'me/jane/x"']:
        assert machine_paths(bad) == [bad]
    for good in ["a/wo" + "rk/b", "/usr/ro" + "ots", "$HOME/x", "the net" + "wo" + "rk/card", "https://x.org/wo" + "rk/y"]:
        assert machine_paths(good) == []


def test_named_tests_exist():
    """docs/footguns.md answers with names of tests; a renamed one would leave an empty promise."""
    page = (ROOT / "docs" / "footguns.md").read_text()
    unit = "\n".join(p.read_text() for p in (ROOT / "tests" / "unit").rglob("*.cpp"))
    suites = {f"{suite}.{name}" for suite, name in re.findall(r"^TEST(?:_P|_F)?\((\w+),\s*(\w+)", unit, re.M)}
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py")), re.M))
    named = set(re.findall(r"`(test_\w+|[A-Z]\w+\.[A-Z]\w+)`", page))
    assert len(named) > 30
    assert named - suites - functions == set()


def test_every_field_of_the_records_is_documented():
    fields = set(re.findall(r'visit\("(\w+)"', (ROOT / "fedshard" / "metrics" / "records.cpp").read_text()))
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert len(fields) > 30
    assert fields - set(re.findall(r"`(\w+)`", page)) == set()
