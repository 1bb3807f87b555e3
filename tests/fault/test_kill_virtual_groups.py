"""Processes that hold a rank of each virtual group: what goes wrong in one of them ends the run, and is told once."""

import contextlib
import re
import signal
import time

import pytest

from fault_runs import ENDLESS, Run, free_port, listening_sockets, rank_environment, wait_until

END_S = 10  # what is promised after a death


def start(workplace, folder, *options, settings=(), **more):
    return Run(folder, "train", workplace / "run.toml", "--virtual-groups", 3, *options,
               settings=("federation.every=2", *settings), **more)


@pytest.mark.parametrize("processes, victim", [(1, 0), (2, 0), (2, 1)])
def test_a_killed_process_ends_the_job(workplace, tmp_path, moments, processes, victim):
    with start(workplace, tmp_path, "--ranks", processes, settings=[f"training.steps={ENDLESS}"]) as run:
        run.wait_for("step", 9)
        sockets = listening_sockets(run.alive())
        time.sleep(moments.uniform(0, 0.5))
        run.signal_rank(victim, signal.SIGKILL)
        assert run.status(END_S) == 4
        ranks = ", ".join(str(victim + group * processes) for group in range(3)) if processes > 1 else "0-2"
        assert run.error_line().startswith(f"process {victim} (ranks {ranks}, one of each group) was killed by SIGKILL")
        assert run.alive() == {}
        wait_until(lambda: not sockets & listening_sockets(), END_S, "ports are free")


def test_a_rank_that_fails_ends_its_process_with_its_own_words(workplace, tmp_path):
    """Every group's loss is soon beyond all numbers; the first to see it speaks, for itself."""
    settings = ("optimizer.name=sgd", "optimizer.lr=1e30", "training.max_norm=0", "federation.every=1000")
    with start(workplace, tmp_path, "--ranks", 2, settings=settings) as run:
        assert run.status() == 1
        line = run.error_line()
        assert line.startswith("rank ") and "of the step is not finite" in line
        assert run.alive() == {}


@pytest.mark.parametrize("victim", [0, 1])
def test_others_learn_of_a_killed_process_under_a_foreign_launcher(workplace, tmp_path, victim):
    """Killed between rounds: who waits in one for the coordinator, which process 0 hosts, waits for its deadline."""
    port = free_port()
    settings = [f"training.steps={ENDLESS}", f"federation.every={ENDLESS}"]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(start(workplace, tmp_path, env=rank_environment(process, 2, port),
                                          settings=settings)) for process in range(2)]
        runs[0].wait_for("step", 9)
        runs[victim].process.kill()
        # At once as a rule; where Gloo misses the death of a peer, its own time-out of 20 s is the deadline.
        assert runs[1 - victim].status(40) == 4
        line = runs[1 - victim].errors().splitlines()[-1]
        assert "rank" in line
        if victim == 1:  # the coordinator lives on in process 0, and knows whom it misses
            assert re.search("ranks 1, 3, 5 (fell silent|sent nothing for 20 s); ", line), line
        assert not any(run.alive() for run in runs)
