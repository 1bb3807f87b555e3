"""scripts/bootstrap.sh takes the right torch: run in a copy of the scripts, with environments whose torch is only a name."""
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "tree" / "scripts")
    (tmp_path / "tree" / "tests").mkdir()
    return tmp_path / "tree"


def make_python(folder, torch):
    """A virtual environment that says it has this torch."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    info = site / f"torch-{torch}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    return folder / "bin" / "python", site


def bootstrap(tree, *arguments, **env):
    clean = {k: v for k, v in os.environ.items() if k not in ("FEDSHARD_PYTHON", "FEDSHARD_FORCE_LOCAL", "VIRTUAL_ENV")}
    return subprocess.run([tree / "scripts/bootstrap.sh", *arguments], capture_output=True, text=True, env=clean | env)


def test_another_torch_is_refused_by_name(tree, tmp_path):
    python, _ = make_python(tmp_path / "env", "2.5.1")
    result = bootstrap(tree, "build", FEDSHARD_PYTHON=str(python))
    assert result.returncode == 1
    assert "torch 2.5.1" in result.stderr and str(python) in result.stderr and "2.13" in result.stderr
    assert not (tree / ".venv").exists()


def test_a_missing_python_is_refused(tree):
    result = bootstrap(tree, "build", FEDSHARD_PYTHON="/nowhere/python3")
    assert result.returncode == 1 and "/nowhere/python3" in result.stderr


def test_a_torch_that_is_there_is_borrowed(tree, tmp_path):
    python, site = make_python(tmp_path / "env", "2.13.1+cu130")
    result = bootstrap(tree, "build", FEDSHARD_PYTHON=str(python))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"torch 2.13.1+cu130 in {site.resolve()}" in result.stdout
    report = subprocess.run([tree / ".venv/bin/python", "-c", "import importlib.metadata as m; print(m.version('torch'))"],
                            capture_output=True, text=True)
    assert report.stdout.strip() == "2.13.1+cu130"
    assert sorted(p.name for p in site.glob("*")) == ["torch-2.13.1+cu130.dist-info"], "somebody else's environment changed"


def test_an_active_environment_is_borrowed_from(tree, tmp_path):
    python, site = make_python(tmp_path / "env", "2.13.0")
    result = bootstrap(tree, "build", PATH=f"{python.parent}:{os.environ['PATH']}", VIRTUAL_ENV=str(tmp_path / "env"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"torch 2.13.0 in {site.resolve()}" in result.stdout


def test_unknown_mode(tree):
    result = bootstrap(tree, "biuld")
    assert result.returncode == 1 and "'biuld'" in result.stderr
