"""Includes point one way: fedshard/rooms.txt is the only table of what each room may include, and CMake builds from the
same lines. The checker returns its findings as text, so that the tests below can show that it does find violations."""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TORCH = re.compile(r"^(ATen|c10|torch|caffe2)/")


def read_table(text):
    """{room: names after the colon}, in the order of the lines."""
    table = {}
    for line in text.splitlines():
        match = re.match(r"^([a-z]+):(.*)$", line)
        if match:
            table[match[1]] = match[2].split()
    return table


def table_problems(table):
    """A room may name only rooms above it: then no cycle can exist."""
    seen, problems = set(), []
    for room, deps in table.items():
        for dep in deps:
            if dep != "+torch" and dep not in seen:
                problems.append(f"rooms.txt: {room} names {dep}, which is not a room above it")
        seen.add(room)
    return problems


def include_problems(table, room, name, text):
    """What is wrong with the includes of one file of a room."""
    problems = []
    if room not in table:
        return [f"{name}: folder {room} has no line in rooms.txt"]
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        kind, path = match[1], match[2]
        where = f"{name}:{number}: {path}"
        parts = path.split("/")
        if kind == '"' and (parts[0] != "fedshard" or len(parts) < 3):
            problems.append(f'{where}: our own includes are written "fedshard/<room>/<file>.h"')
        elif parts[0] == "fedshard" and (kind == "<" or parts[1] not in [room, *table[room]]):
            problems.append(f"{where}: rooms.txt does not let {room} include {parts[1]}")
        elif TORCH.match(path) and "+torch" not in table[room]:
            problems.append(f"{where}: {room} is a room without torch")
    return problems


TABLE = read_table((ROOT / "fedshard" / "rooms.txt").read_text())


def sources():
    for path in sorted((ROOT / "fedshard").rglob("*")):
        if path.suffix in (".h", ".cpp"):
            yield path


def test_the_table_has_no_cycle():
    assert len(TABLE) > 10
    assert table_problems(TABLE) == []


def test_includes_follow_the_table():
    problems = []
    for path in sources():
        relative = path.relative_to(ROOT)
        problems += include_problems(TABLE, relative.parts[1], str(relative), path.read_text())
    assert problems == []


def test_every_file_belongs_to_a_room():
    strays = [p.name for p in (ROOT / "fedshard").iterdir() if p.is_file() and p.name != "rooms.txt"]
    assert strays == []


def test_the_checker_finds_violations():
    table = read_table("# comment\nbase:\nplan: base\nnn: base plan +torch\n")
    bad = {
        "base": ['#include "fedshard/plan/units.h"', "#include <ATen/ATen.h>", "#  include <c10/core/Device.h>"],
        "plan": ['#include "fedshard/nn/llama.h"', "#include <torch/types.h>", '#include "units.h"', "#include <fedshard/base/log.h>"],
        "nn": ['#include "fedshard/train/trainer.h"', '#include "../plan/units.h"'],
        "attic": ["#include <vector>"],
    }
    for room, lines in bad.items():
        for line in lines:
            assert len(include_problems(table, room, "x.h", line)) == 1, (room, line)


def test_the_checker_lets_the_rest_pass():
    table = read_table("base:\nplan: base\nnn: base plan +torch\n")
    text = '#include "fedshard/nn/block.h"\n#include "fedshard/plan/units.h"\n#include <ATen/ATen.h>\n#include <vector>\n'
    assert include_problems(table, "nn", "x.cpp", text) == []


def test_the_table_checker_finds_a_cycle():
    assert len(table_problems(read_table("base: plan\nplan: base\n"))) == 1
    assert len(table_problems(read_table("base: base\n"))) == 1
