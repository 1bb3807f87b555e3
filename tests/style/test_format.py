"""All our C++ is as clang-format leaves it, by the release that tests/requirements.txt pins (others differ in detail)."""
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLANG_FORMAT = Path(sys.executable).parent / "clang-format"
FOLDERS = ["fedshard", "tests", "cmake", "examples"]


def check(arguments, **kwargs):
    command = [CLANG_FORMAT, "--dry-run", "-Werror", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def test_release():
    pin = next(line for line in (ROOT / "tests/requirements.txt").read_text().splitlines() if line.startswith("clang-format"))
    version = subprocess.run([CLANG_FORMAT, "--version"], capture_output=True, text=True, check=True).stdout
    assert pin.split("==")[1] in version


def test_tree_is_formatted():
    files = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".h", ".cpp")]
    assert files
    result = check(files)
    wrong = sorted({line.split(":")[0] for line in result.stderr.splitlines() if "error:" in line})
    assert result.returncode == 0, "run `make format` for:\n" + "\n".join(wrong)


@pytest.mark.parametrize("text, status", [("int f() { return 1; }\n", 0), ("int  f( ){return 1;}\n", 1)])
def test_the_check_can_fail(text, status):
    result = check([f"--style=file:{ROOT / '.clang-format'}"], input=text)
    assert result.returncode == status, result.stderr
