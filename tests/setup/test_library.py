"""The engine as a library: the commands of docs/library.md, with the installed tree moved before anything is built
against it, so that a path which it should not name leads nowhere."""
import concurrent.futures
import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("FEDSHARD_BUILD", "build/release")
PAGE = ROOT / "docs" / "library.md"
DEADLINE_S = 300  # of any command here
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM", "OMPI_",
                      "PMI", "FEDSHARD_")
TORCH = Path(torch.__file__).parent
LINE = re.compile(r"step (\d+) group (\d+) loss (\d+\.\d+) digest ([0-9a-f]+)")


def cached(name):
    """A variable of the build's CMake cache."""
    return re.search(rf"^{name}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.M)[1]


CMAKE, COMPILER = cached("CMAKE_COMMAND"), cached("CMAKE_CXX_COMPILER")


def environment(**extra):
    """Without a launcher's variables; with the tools that the build used, which need not be on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    tools = [str(Path(tool).parent) for tool in (CMAKE, cached("CMAKE_MAKE_PROGRAM"))]
    return {**kept, "PATH": ":".join([*tools, kept["PATH"]]), "CXX": COMPILER, "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive", **extra}


def run(command, **extra):
    return subprocess.run([str(part) for part in command], env=environment(**extra), cwd=ROOT, timeout=DEADLINE_S,
                          capture_output=True, text=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The commands of the page, but the first line, which scripts/test.sh has done. `prefix` is where the tree lies now, `named` where
    it was installed, `output` what the example printed."""
    home = tmp_path_factory.mktemp("home")
    build, install, *rest = re.search(r"```bash\n(.*?)```", PAGE.read_text(), re.S)[1].splitlines()
    assert build == "make build && source .deps/env.sh" and "--install build/release" in install
    named, prefix = home / "fedshard", home / "moved" / "there"
    prefix.parent.mkdir()

    def shell(line):
        done = run(["bash", "-c", line], HOME=str(home))
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    shell(install.replace("build/release", str(BUILD)))
    named.rename(prefix)
    output = [shell(line.replace("$HOME/fedshard", str(prefix))) for line in rest][-1]
    return types.SimpleNamespace(prefix=prefix, named=named, program=home / "own-model" / "own-model", output=output)


def losses(output, groups, steps=60, every=10):
    """Losses by step and group, of the example's output: every group has said the same digest at each round."""
    said = {}
    for line in output.splitlines():
        if match := LINE.fullmatch(line):
            said.setdefault(int(match[1]), {})[int(match[2])] = (float(match[3]), match[4])
    assert sorted(said) == list(range(every, steps + 1, every)), output
    digests = []
    for step, by_group in said.items():
        assert sorted(by_group) == list(range(groups)), output
        assert len({digest for _, digest in by_group.values()}) == 1, f"groups differ at step {step}"
        digests.append(by_group[0][1])
    assert len(set(digests)) == len(digests), "a round has changed nothing"
    return [[said[step][group][0] for group in range(groups)] for step in sorted(said)]


def assert_learns(by_step):
    for first, last in zip(by_step[0], by_step[-1]):
        assert first < math.log(256) + 1, "worse than any guess"
        assert last < first - 0.5


def run_ranks(program, world, *arguments):
    """The example's ranks without torchrun, which takes seconds to start: the store is ours."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(world):
            process = subprocess.Popen([program, *map(str, arguments)], env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **place),
                                       cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(process.kill)
            ranks.append(process)
        outputs = [process.communicate(timeout=DEADLINE_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world, outputs
    return "".join(output for output, _ in outputs)


def test_the_page_trains_two_groups_of_two_shards(tree):
    assert_learns(losses(tree.output, groups=2))


def test_two_ranks_shard_one_model(tree):
    output = run_ranks(tree.program, 2, "LICENSE", 1)
    assert_learns(losses(output, groups=1))


def test_groups_of_one_rank(tree):
    assert_learns(losses(run_ranks(tree.program, 3, "LICENSE", 3), groups=3))


@pytest.mark.parametrize("arguments, launched, words", [
    (["LICENSE", "2"], False, "with torchrun"),
    (["LICENSE"], True, "with torchrun"),
    (["nowhere", "1"], True, "'nowhere' has 0 bytes"),
])
def test_the_example_says_what_it_needs(tree, arguments, launched, words):
    place = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1") if launched else {}
    done = run([tree.program, *arguments], **place)
    assert done.returncode == 1 and words in done.stderr


def test_the_program_is_installed(tree):
    done = run([tree.prefix / "bin" / "fedshard", "--help"])
    assert done.returncode == 0 and "train" in done.stdout


def test_nothing_names_the_build(tree):
    texts = [path for path in tree.prefix.rglob("*") if path.suffix in (".h", ".cmake")]
    assert len([p for p in texts if p.suffix == ".cmake"]) >= 5
    found = {str(path.relative_to(tree.prefix)): place for path in texts
             for place in {str(ROOT), str(BUILD), str(tree.named), str(TORCH), str(TORCH.resolve())}
             if place in path.read_text()}
    assert found == {}


def headers(prefix):
    include = prefix / "include"
    return {str(path.relative_to(include)): path for path in include.rglob("*.h")}


def private_includes(public, text):
    """Includes of a header that an installed tree does not have, or that would ask a user for another library."""
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.M)
    return [name for name in included if not (
        name in public if name.startswith("fedshard/") else re.fullmatch(r"[a-z_]+|(ATen|c10|torch|fmt)/.*", name))]


def test_public_headers_include_no_private_ones(tree):
    public = headers(tree.prefix)
    assert {"fedshard/shard/engine.h", "fedshard/nn/unit_module.h", "fedshard/plan/units.h"} <= set(public)
    assert {name: bad for name, path in public.items() if (bad := private_includes(public, path.read_text()))} == {}


def test_the_include_check_can_fail():
    text = '#include <vector>\n#include <ATen/ATen.h>\n#include "fedshard/a/b.h"\n#include "fedshard/a/c.h"\n#include <zmq.hpp>\n'
    assert private_includes({"fedshard/a/b.h"}, text) == ["fedshard/a/c.h", "zmq.hpp"]


def test_public_headers_compile_alone(tree):
    torch_include = TORCH / "include"
    command = [COMPILER, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DFMT_HEADER_ONLY",
               f"-I{tree.prefix / 'include'}", f"-isystem{torch_include}", f"-isystem{torch_include / 'torch/csrc/api/include'}",
               "-x", "c++", "-"]

    def complaints(name):
        done = subprocess.run(command, input=f'#include "{name}"\n', capture_output=True, text=True, timeout=DEADLINE_S)
        return done.stderr if done.returncode else ""

    names = sorted(headers(tree.prefix))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {name: text for name, text in zip(names, pool.map(complaints, names)) if text}
    assert found == {}


def configure(tree, folder, *options, version="0.1"):
    """Status and words of CMake for a project that asks for the package."""
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.22)\nproject(x LANGUAGES CXX)\n"
                                           f"find_package(fedshard {version} REQUIRED)\n")
    done = run([CMAKE, "-S", folder, "-B", folder / "b", "-G", "Ninja", f"-Dfedshard_ROOT={tree.prefix}", *options])
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_another_torch_is_refused_by_name(tree, tmp_path):
    other = tmp_path / "libtorch"
    (other / "lib").mkdir(parents=True)
    (other / "lib" / "libtorch_cpu.so").touch()
    header = other / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in
                              (("MAJOR", 2), ("MINOR", 1), ("PATCH", 31))))
    status, words = configure(tree, tmp_path / "project", f"-DFEDSHARD_TORCH={other}")
    assert status != 0
    assert f"torch 2.1.31 in {other} is not supported: this fedshard was built with torch 2.13" in words
    assert "-DFEDSHARD_PYTHON" in words


def test_no_torch_is_said(tree, tmp_path):
    status, words = configure(tree, tmp_path / "project", f"-DFEDSHARD_PYTHON={shutil.which('false')}")
    assert status != 0 and "fedshard needs torch 2.13 and found none" in words


@pytest.mark.parametrize("option", ["-DFEDSHARD_TORCH={}", "-DTORCH_INSTALL_PREFIX={}", "-DCMAKE_PREFIX_PATH={}",
                                    "-DCMAKE_PREFIX_PATH={}/share/cmake"])
def test_torch_is_found_where_it_is_said_to_be(tree, tmp_path, option):
    link = tmp_path / "libtorch"
    link.symlink_to(TORCH)
    status, words = configure(tree, tmp_path / "project", option.format(link))
    assert status == 0 and f"{torch.__version__.split('+')[0]} in {link} " in words, words


def test_a_python_that_is_named_comes_before_prefixes(tree, tmp_path):
    link = tmp_path / "libtorch"
    link.symlink_to(TORCH)
    status, words = configure(tree, tmp_path / "project", f"-DCMAKE_PREFIX_PATH={link}", f"-DFEDSHARD_PYTHON={sys.executable}")
    assert status == 0 and f" in {TORCH} " in words, words


def test_another_minor_version_is_refused(tree, tmp_path):
    status, words = configure(tree, tmp_path / "project", version="0.0.9")
    assert status != 0 and "0.1.0" in words
