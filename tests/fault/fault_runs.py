"""Runs that are meant to go wrong: starts the program, watches its processes through /proc, and reads what it left.

Every process that a test starts carries a mark of that test in its environment, which its children inherit. So "nothing
is left" is asked of the whole machine and not of the processes that the test happens to know.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("FEDSHARD_BUILD", "build/release") / "fedshard"
MARK = "FAULT_TEST_MARK"
DEADLINE_S = 90  # of what must end anyhow; where a test promises a time, it gives that one
ENDLESS = 10_000_000  # steps

CONFIG = """
[model]
preset = "llama-tiny"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
vocab_size = 257

[data]
train = "{folder}/train.txt"

[training]
dtype = "fp32"
local_batch_size = 1
seq_len = 16
steps = 3
threads = 1

[comm]
timeout_s = 20

[metrics]
progress = false
"""

# Through these a launcher around the tests would tell the program where it stands.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM", "OMPI_", "PMI", "FEDSHARD_")


def environment(**extra):
    """This process's without a launcher's variables, with `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    return {**kept, "OMP_WAIT_POLICY": "passive", **{name: str(value) for name, value in extra.items()}}


def rank_environment(rank, world, port, **extra):
    """What torchrun tells a rank on one machine."""
    return environment(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=port, **extra)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def environment_of(pid):
    try:
        entries = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry)


def listening_sockets(pids=None):
    """Kernel numbers of the TCP sockets that listen: all, or those of some processes."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets.add(fields[9])
    if pids is None:
        return sockets
    held = set()
    for pid in pids:
        for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:["):
                held.add(target[len("socket:["):-1])
    return sockets & held


def read_records(folder, may_be_cut=False):
    """metrics.jsonl, by a strict parser: complete lines, objects, no NaN and no Infinity. The kernel cuts the write of a
    process that is killed at the end of a page; where that may have happened the last line need not be complete."""
    def refuse(word):
        raise AssertionError(f"metrics.jsonl holds the number {word}")

    text = (folder / "metrics.jsonl").read_text()
    if may_be_cut and len(text) % os.sysconf("SC_PAGE_SIZE") == 0:
        text = text[:text.rfind("\n") + 1]
    assert text == "" or text.endswith("\n"), text[-300:]
    records = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert all(isinstance(record, dict) and {"kind", "step", "time_s"} <= record.keys() for record in records)
    return records


def wait_until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def heed_signals():
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """One `fedshard` command and all its processes; the run folder is `folder`/run. As a context manager it leaves no
    process behind."""

    def __init__(self, folder, *arguments, settings=(), env=None, run_folder=None):
        self.folder = run_folder or folder / "run"
        self.mark = uuid.uuid4().hex
        self._error_file = folder / f"stderr.{self.mark}"
        command = [PROGRAM, *arguments]
        if arguments and arguments[0] == "train":
            for setting in (f"metrics.folder={self.folder}", *settings):
                command += ["--set", setting]
        with open(self._error_file, "wb") as error:
            # A shell makes its background jobs ignore SIGINT, nohup its command SIGHUP, and they pass that on.
            self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL,
                                            preexec_fn=heed_signals,
                                            stdout=subprocess.DEVNULL, stderr=error, start_new_session=True, cwd=folder,
                                            env={**(environment() if env is None else env), MARK: self.mark})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def alive(self):
        """The processes of this run, as process number -> rank (-1: the launcher)."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            variables = environment_of(entry.name)
            if variables.get(MARK) == self.mark and is_alive(entry.name):
                found[int(entry.name)] = int(variables.get("RANK", -1))
        return found

    def signal_rank(self, rank, number):
        [pid] = [pid for pid, its_rank in self.alive().items() if its_rank == rank]
        os.kill(pid, number)

    def wait_for(self, kind, count):
        """Until metrics.jsonl has `count` records of a kind."""
        def has_them():
            assert self.process.poll() is None, f"ended too early: {self.errors()}"
            metrics = self.folder / "metrics.jsonl"
            return metrics.exists() and metrics.read_text().count(f'"kind":"{kind}"') >= count
        wait_until(has_them, DEADLINE_S, f"{count} records of kind {kind}")

    def status(self, within_s=DEADLINE_S):
        """The exit status; fails where the program takes longer."""
        return self.process.wait(timeout=within_s)

    def errors(self):
        return self._error_file.read_text()

    def error_line(self):
        """Standard error, which must be one line of the program's, without what libraries say to their developers."""
        text = self.errors()
        assert not any(noise in text for noise in ("/pytorch/", "frame #", "Exception raised", "typically"))
        assert text.startswith("fedshard: ") and text.endswith("\n") and text.count("\n") == 1, text
        return text[len("fedshard: "):-1]
