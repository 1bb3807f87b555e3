"""What goes wrong once ranks have started: ranks that don't belong together, numbers that leave the finite, a disk that
is full. Where the ranks are started by hand, as torchrun would, each speaks and ends for itself."""

import contextlib
import json
import subprocess
import time

import pytest

from fault_runs import DEADLINE_S, ENDLESS, PROGRAM, Run, environment, free_port, rank_environment, read_records


@contextlib.contextmanager
def ranks_by_hand(workplace, folder, places, settings=()):
    """One process for each (rank, world, its own settings) of `places`; rank 0 hosts the coordinator."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Run(folder, "train", workplace / "run.toml", env=rank_environment(rank, world, port),
                                       settings=[*settings, *own]))
               for rank, world, own in places]


def last_line(run):
    """What a rank says at its end; rank 0 has said before where it is."""
    return run.errors().splitlines()[-1]


@pytest.mark.parametrize("second", [(1, 2, ["optimizer.lr=0.5"]), (1, 3, [])], ids=["settings", "world"])
def test_ranks_must_agree(workplace, tmp_path, second):
    with ranks_by_hand(workplace, tmp_path, [(0, 2, []), second]) as runs:
        for run in runs:
            assert run.status() == 2, run.errors()
            line = last_line(run)  # whoever came second is named by all
            assert " has another configuration than rank " in line and "give all ranks the same file" in line
            assert "same number of ranks" in line
        assert not any(run.alive() for run in runs)
    assert not read_records(tmp_path / "run")


def test_a_rank_that_never_comes_is_named(workplace, tmp_path):
    """Rank 1 of 3 is missing. Rank 0, which hosts the coordinator, says so."""
    with ranks_by_hand(workplace, tmp_path, [(0, 3, []), (2, 3, [])], ["comm.timeout_s=3"]) as runs:
        for run in runs:
            assert run.status() == 4, run.errors()
        line = last_line(runs[0])
        assert line.startswith("fedshard: rank 1 did not join; rank ") and "3000ms" in line
        assert "cannot connect the shard axis of group 0, replica 0 (3 ranks): " in line
        assert "cannot connect" in last_line(runs[1]) or "rank 1 did not join" in last_line(runs[1])


@pytest.mark.parametrize("victim", [0, 1])
def test_others_learn_of_a_rank_killed_under_a_foreign_launcher(workplace, tmp_path, victim):
    places = [(rank, 3, []) for rank in range(3)]
    with ranks_by_hand(workplace, tmp_path, places, [f"training.steps={ENDLESS}"]) as runs:
        runs[0].wait_for("step", 3)
        runs[victim].process.kill()
        others = [run for rank, run in enumerate(runs) if rank != victim]
        for run in others:
            # At once as a rule; where Gloo misses the death of a peer, its own time-out of 20 s is the deadline.
            assert run.status(40) == 4, run.errors()
        assert any(f"rank {victim}" in last_line(run) for run in others)
        if victim != 0:  # where rank 0 lives, it has asked the others before it speaks
            assert last_line(runs[0]).startswith(f"fedshard: rank {victim} fell silent; ")
    read_records(tmp_path / "run", may_be_cut=victim == 0)


def test_others_learn_of_a_killed_coordinator(workplace, tmp_path, moments):
    """Rank 0's process hosts it. The others need not be in a collective: mostly they wait for its word on a round."""
    settings = [f"training.steps={ENDLESS}", "parallelism.groups=3", "federation.every=1", "comm.timeout_s=5"]
    with ranks_by_hand(workplace, tmp_path, [(rank, 3, []) for rank in range(3)], settings) as runs:
        runs[0].wait_for("round", 2)
        time.sleep(moments.uniform(0, 0.5))
        runs[0].process.kill()
        for run in runs[1:]:
            assert run.status(20) == 4, run.errors()


def test_a_number_that_is_not_finite_ends_all_ranks_alike(workplace, tmp_path):
    with ranks_by_hand(workplace, tmp_path, [(0, 2, []), (1, 2, [])], ["optimizer.lr=1e30"]) as runs:
        for rank, run in enumerate(runs):
            assert run.status() == 1, run.errors()
            line = last_line(run)
            assert line.startswith(f"fedshard: rank {rank}: the ") and " of the step is not finite (loss " in line
            assert "lower the learning rate" in line
    assert [record["step"] for record in read_records(tmp_path / "run") if record["kind"] == "step"] == [1]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_launcher_tells_of_a_number_that_is_not_finite(workplace, tmp_path, groups):
    settings = ["optimizer.lr=1e30", f"parallelism.groups={groups}"]
    with Run(tmp_path, "train", workplace / "run.toml", "--ranks", 2, settings=settings) as run:
        assert run.status() == 1
        line = run.error_line()
        assert line.startswith("rank ") and line.count("rank ") == 1 and " of the step is not finite (loss " in line
        assert run.alive() == {}


def test_too_little_memory_is_said_in_a_line(workplace, tmp_path):
    """More than any machine has, so that the very first allocation fails."""
    settings = ["training.local_batch_size=1_073_741_824", "training.seq_len=4096", "model.max_position_embeddings=4096"]
    with Run(tmp_path, "train", workplace / "run.toml", settings=settings) as run:
        assert run.status() == 1
        line = run.error_line()
        assert line.startswith("rank 0 (group 0)") and "out of memory" in line and "local_batch_size" in line


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_the_run_with_whole_records(workplace, tmp_path, small_disk):
    with Run(tmp_path, "train", workplace / "run.toml", "--ranks", 2, settings=[f"training.steps={ENDLESS}"],
             run_folder=small_disk / "run") as run:
        assert run.status() == 1
        line = run.error_line()
        assert "disk/run/metrics.jsonl: cannot append a record: " in line and "space" in line
        assert run.alive() == {}
        records = read_records(run.folder)
        assert [record["step"] for record in records if record["kind"] == "step"] == list(range(1, len(records)))
        assert len(json.dumps(records)) > 4096


def test_closed_standard_streams_do_not_spoil_the_records(workplace, tmp_path):
    """A daemon may start the program without descriptors 0 to 2; no file of the run may take their numbers."""
    folder = tmp_path / "run"
    command = [PROGRAM, "train", workplace / "run.toml", "--ranks", "2", "--set", f"metrics.folder={folder}", "--set",
               "metrics.progress=true"]
    closed = subprocess.run(["bash", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "-", *map(str, command)], env=environment(),
                            timeout=DEADLINE_S, check=False)
    assert closed.returncode == 0
    kinds = [json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert kinds[0] == "start" and kinds[-1] == "end"
