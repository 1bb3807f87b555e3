"""The demo's text: nothing lost, nothing in both parts, the same split every time."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo_split.py"


def run(out, *genres):
    return subprocess.run([sys.executable, SCRIPT, out, *genres], capture_output=True, text=True)


def records(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def write_text(folder, name, paragraphs, words):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n\n".join(f"{name} paragraph {i} " + "word " * words for i in range(paragraphs)))


@pytest.mark.parametrize("paragraphs, words", [(7, 3000), (211, 101), (5003, 20)])
def test_split_is_whole_and_stable(tmp_path, paragraphs, words):
    write_text(tmp_path / "in" / "b", "one.txt", paragraphs, words)
    write_text(tmp_path / "in" / "a", "two.md", 13, 7)
    for out in ("x", "y"):
        result = run(tmp_path / out, f"own={tmp_path / 'in'}")
        assert result.returncode == 0, result.stderr
    train, held = records(tmp_path / "x/train/own.jsonl"), records(tmp_path / "x/eval/own.jsonl")
    assert train and held and not set(train) & set(held)
    assert records(tmp_path / "y/train/own.jsonl") == train and records(tmp_path / "y/eval/own.jsonl") == held

    def numbered(texts):
        return sorted(p.split(" word")[0].strip() for t in texts for p in t.split("\n\n"))

    whole = [f"one.txt paragraph {i}" for i in range(paragraphs)] + [f"two.md paragraph {i}" for i in range(13)]
    assert numbered(train + held) == sorted(whole)
    largest = max(map(len, held))
    assert sum(map(len, held)) <= 0.02 * sum(map(len, train + held)) + largest
    if paragraphs == 5003:  # fine enough to be split evenly
        assert sum(map(len, held)) >= 0.018 * sum(map(len, train + held))


def test_every_genre_is_in_both_parts(tmp_path):
    for genre, paragraphs in (("big", 4001), ("small", 120)):
        write_text(tmp_path / genre, "t.txt", paragraphs, 120)
    assert run(tmp_path / "out", f"big={tmp_path / 'big'}", f"small={tmp_path / 'small'}").returncode == 0
    for part in ("train", "eval"):
        assert all(records(tmp_path / "out" / part / f"{genre}.jsonl") for genre in ("big", "small"))


def test_bytes_that_are_no_text_do_not_stop_it(tmp_path):
    write_text(tmp_path / "in", "t.txt", 500, 50)
    (tmp_path / "in" / "latin.txt").write_bytes(b"caf\xe9\n\n" * 100)
    assert run(tmp_path / "out", f"own={tmp_path / 'in'}").returncode == 0


@pytest.mark.parametrize("paragraphs", [0, 1, 10])
def test_too_little_text_is_refused(tmp_path, paragraphs):
    write_text(tmp_path / "in", "t.txt", paragraphs, 50)
    result = run(tmp_path / "out", f"own={tmp_path / 'in'}")
    assert result.returncode != 0 and str(tmp_path / "in") in result.stderr and "65536" in result.stderr
