"""Runs of the real program for the tests of this folder: config in, metrics out.

Every run is a process of its own with a deadline, in a folder of its own, and sees no launcher's variables but those
that the test gives it. A run that fails makes the test fail with what the program said.
"""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess

import numpy
import safetensors.numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = ROOT / os.environ.get("FEDSHARD_BUILD", "build/release") / "fedshard"
DEADLINE_S = 150  # of any process here; a run takes a few seconds on an idle machine

# Variables through which a launcher, or a job that the tests run in, would tell the program where it stands.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM",
                      "OMPI_", "PMI", "FEDSHARD_")

SEQ_LEN = 32
STEPS = 20
BATCH = 12  # sequences of a step over the whole world: divides by 1, 2, 3 and 4
VOCABULARY = 257  # the byte tokenizer's; prime, so that hardly any unit divides evenly among shards
# Small, with nothing that divides by 3, grouped queries, and heads of more than two elements.
MODEL = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}


def make_text(length, seed):
    """Words from a small vocabulary: enough structure for the loss to fall within a few steps."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(2, 7))) for _ in range(40)]
    text = ""
    while len(text) < length:
        text += " ".join(rng.choice(words) for _ in range(rng.randint(4, 9))) + ".\n"
    return text[:length]


def clean_environment(**extra):
    """Without a launcher's variables. Threads that wait for work sleep instead of spinning, since there are more ranks
    than cores here; that changes no number."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    return {**kept, "OMP_WAIT_POLICY": "passive", **{name: str(value) for name, value in extra.items()}}


def run_process(command, environment, deadline_s=DEADLINE_S, folder=None):
    """The finished process. At the deadline the whole process group is killed and the test fails."""
    process = subprocess.Popen([str(part) for part in command], env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                               cwd=folder)
    return finish(process, deadline_s)


def finish(process, deadline_s=DEADLINE_S):
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not done after {deadline_s} s: {process.args}\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def to_toml(tables):
    """JSON's spelling of scalars and lists is TOML's as well. Keys whose value is None are left out."""
    lines = []
    for name, keys in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(str(value) if isinstance(value, pathlib.Path) else value)}"
                  for key, value in keys.items() if value is not None]
    return "\n".join(lines) + "\n"


class Run:
    """What one run left in its folder."""

    def __init__(self, folder, stderr=""):
        self.folder = folder
        self.stderr = stderr
        self.lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in self.lines]

    def of(self, kind, **fields):
        return [r for r in self.records if r["kind"] == kind and all(r[k] == v for k, v in fields.items())]

    @property
    def start(self):
        return self.of("start")[0]

    @property
    def groups(self):
        return len(self.start["groups"])

    def column(self, name, group=0):
        """A field of one group's steps, in order; none is missing."""
        steps = self.of("step", group=group)
        assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
        return [s[name] for s in steps]

    def losses(self, group=0):
        return self.column("loss", group)

    def norms(self, group=0):
        return self.column("grad_norm", group)

    def final_eval(self):
        return self.of("eval")[-1]

    def traffic(self):
        """The last record: the whole run's bytes."""
        return self.of("traffic")[-1]

    def numbers_as_text(self):
        """Loss and gradient norm of every step and every evaluation's loss, as they are spelled in the file."""
        records = [json.loads(line, parse_float=str) for line in self.lines]
        steps = sorted((r["group"], r["step"], r["loss"], r["grad_norm"]) for r in records if r["kind"] == "step")
        evals = [(r["step"], r["loss"]) for r in records if r["kind"] == "eval"]
        digests = [(r["step"], r["digest"]) for r in records if r["kind"] == "round"]
        return steps, evals, digests


class Program:
    """`fedshard` in one folder: run folders, caches and configs of all runs lie there."""

    def __init__(self, folder, base_config):
        self.folder = folder
        self.base_config = base_config
        self.runs = 0

    def config(self, **tables):
        """Path of a config and its run folder: the base config with `tables` laid over it, key by key; None takes a key
        away."""
        self.runs += 1
        merged = {name: dict(keys) for name, keys in self.base_config.items()}
        for name, keys in tables.items():
            merged.setdefault(name, {}).update(keys)
        run_folder = self.folder / f"run{self.runs}"
        merged["metrics"] = {"folder": run_folder, "progress": False, **tables.get("metrics", {})}
        path = self.folder / f"run{self.runs}.toml"
        path.write_text(to_toml(merged))
        return path, run_folder

    def environment(self, **extra):
        return clean_environment(XDG_CACHE_HOME=self.folder / "cache", **extra)

    def train(self, ranks, overrides=(), **tables):
        """`fedshard train --ranks N`, from config to metrics."""
        path, run_folder = self.config(**tables)
        command = [BINARY, "train", path, "--ranks", ranks]
        for override in overrides:
            command += ["--set", override]
        return self.result(run_process(command, self.environment()), run_folder)

    @staticmethod
    def result(done, run_folder):
        logs = "".join(f"\n--- {p.name}\n{p.read_text()[-2000:]}" for p in sorted((run_folder / "ranks").glob("*.err")))
        assert done.returncode == 0, f"status {done.returncode} of {done.args}\n{done.stdout}\n{done.stderr}{logs}"
        run = Run(run_folder, done.stderr)
        assert run.records[-1]["kind"] == "end", run.records[-1]
        return run


def read_tokens(path):
    """The ids of a token file: a header of 4096 bytes, then 32-bit ids."""
    return numpy.fromfile(path, dtype="<i4", offset=4096)


def windows(tokens, seq_len=SEQ_LEN):
    """All sequences of a stream of tokens, [n, seq_len + 1]: window i begins at token i * seq_len."""
    count = (len(tokens) - 1) // seq_len
    return numpy.stack([tokens[i * seq_len:i * seq_len + seq_len + 1] for i in range(count)]).astype("int64")


def data_order(path, count, seed, seq_len=SEQ_LEN):
    """Indices of the first `count` sequences that a run with this seed trains on, from the program itself."""
    done = run_process([BINARY, "data", "inspect", path, "--order", count, "--seed", seed, "--seq-len", seq_len],
                       clean_environment())
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 3]
    rows = [[int(number) for number in row] for row in rows if all(cell.isdigit() for cell in row)]
    assert [row[0] for row in rows] == list(range(count))
    return [row[2] for row in rows]


def with_nan(folder, source):
    """The model with one NaN, in the row of a byte that few sequences hold: most steps are fine at first."""
    folder.mkdir()
    tensors = dict(safetensors.numpy.load_file(source / "model.safetensors"))
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.embed_tokens.weight"][ord("\n"), 0] = float("nan")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def assert_close(actual, expected, tolerance, what):
    assert len(actual) == len(expected) > 0, f"{what}: {len(actual)} numbers against {len(expected)}"
    for i, (a, b) in enumerate(zip(actual, expected)):
        assert abs(a - b) <= tolerance * abs(b), f"{what} {i + 1}: {a} against {b}, {abs(a - b) / abs(b):.2e} apart"
