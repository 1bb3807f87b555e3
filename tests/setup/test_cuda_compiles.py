"""The CUDA build compiles: its one file, with the build's own flags, against torch's CUDA headers, a CUDA toolkit and
NCCL's header. Nothing is linked and nothing runs, so neither a GPU nor a CUDA build of torch is needed: CMake is shown
an environment that looks like one, made of links to the real headers and of empty libraries.

What the CPU wheel or a partly installed toolkit lacks comes from cuda_headers/, a few names each.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NCCL = "nvidia-nccl-cu13==2.28.9"
MATH_HEADERS = ["cublas_v2.h", "cublasLt.h", "cusparse.h", "cusolver_common.h", "cusolverDn.h"]
CUDA_CODE = re.compile(r"c10/cuda|ATen/cuda|ProcessGroupNCCL\.hpp|cuda_runtime|[<\"]nccl\.h|FEDSHARD_HAS_CUDA")


def torch_folder():
    return Path(find_spec("torch").submodule_search_locations[0])


def toolkit():
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for place in filter(None, places):
        if (Path(place) / "include/cuda_runtime_api.h").exists():
            return Path(place)
    pytest.skip("no CUDA toolkit: cuda_runtime_api.h is neither in CUDA_HOME nor in /usr/local/cuda")


def nccl_header(scratch):
    """From the wheel, of which nothing else is kept."""
    kept = ROOT / ".cache" / NCCL.replace("==", "-") / "nccl.h"
    if not kept.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, NCCL]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"{NCCL} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
        (wheel,) = scratch.glob("*.whl")
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_bytes(zipfile.ZipFile(wheel).read("nvidia/nccl/include/nccl.h"))
        part.replace(kept)
        wheel.unlink()
    return kept


@pytest.fixture
def cuda_python(tmp_path):
    """A Python whose torch has the looks of a CUDA build."""
    cuda, nccl = toolkit(), nccl_header(tmp_path)
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    site = tmp_path / f"env/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    info = site / "torch-2.13.0+cu130.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cu130\n")
    (site / "torch/lib").mkdir(parents=True)
    (site / "torch/__init__.py").touch()
    (site / "torch/include").symlink_to(torch_folder() / "include")
    for library in ["libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so"]:
        (site / "torch/lib" / library).touch()
    (site / "nvidia/cu13").mkdir(parents=True)
    (site / "nvidia/cu13/include").symlink_to(cuda / "include")
    ours = site / "nvidia/nccl/include"
    ours.mkdir(parents=True)
    shutil.copy(nccl, ours)
    lacking = [h for h in MATH_HEADERS if not (cuda / "include" / h).exists()]
    if not (torch_folder() / "include/c10/cuda/impl/cuda_cmake_macros.h").exists():
        lacking.append("c10/cuda/impl/cuda_cmake_macros.h")
    for header in lacking:
        (ours / header).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests/setup/cuda_headers" / header, ours / header)
    return tmp_path / "env/bin/python"


def configure(folder, *options):
    command = ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DFEDSHARD_TESTS=OFF", *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_cuda_build_compiles(cuda_python, tmp_path):
    build = tmp_path / "build"
    done = configure(build, "-DFEDSHARD_CUDA=ON", f"-DFEDSHARD_PYTHON={cuda_python}")
    assert done.returncode == 0, done.stderr
    commands = {entry["file"]: entry["command"] for entry in json.loads((build / "compile_commands.json").read_text())}
    assert str(ROOT / "fedshard/comm/nccl_absent.cpp") not in commands
    assert " -Werror" in commands[str(ROOT / "fedshard/comm/nccl.cpp")]
    target = "CMakeFiles/fedshard_comm.dir/fedshard/comm/nccl.cpp.o"
    done = subprocess.run(["ninja", "-C", build, "-j1", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    symbols = subprocess.run(["nm", "-C", build / target], capture_output=True, text=True, check=True).stdout
    assert "T fedshard::comm::connect_over_nccl" in symbols and "U c10d::ProcessGroupNCCL::" in symbols


def test_cuda_code_is_in_one_file():
    files = [p for p in (ROOT / "fedshard").rglob("*") if p.suffix in (".h", ".cpp")]
    assert [str(p.relative_to(ROOT)) for p in files if CUDA_CODE.search(p.read_text())] == ["fedshard/comm/nccl.cpp"]


@pytest.mark.skipif((torch_folder() / "lib/libtorch_cuda.so").exists(), reason="this torch is a CUDA build")
def test_a_cpu_torch_goes_with_auto_but_not_with_on(tmp_path):
    done = configure(tmp_path / "build", "-DFEDSHARD_CUDA=AUTO", f"-DFEDSHARD_PYTHON={sys.executable}")
    assert done.returncode == 0 and "CUDA: off; there is no CUDA build of torch" in done.stdout, done.stderr
    done = configure(tmp_path / "build", "-DFEDSHARD_CUDA=ON", f"-DFEDSHARD_PYTHON={sys.executable}")
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "FEDSHARD_CUDA=ON, but there is no CUDA build of torch (this is 2.13." in said
    done = configure(tmp_path / "build", "-DFEDSHARD_CUDA=yes", f"-DFEDSHARD_PYTHON={sys.executable}")
    assert done.returncode != 0 and "FEDSHARD_CUDA is 'yes'" in done.stderr
