"""A rank or the launcher is killed, stopped or asked to stop while training: the job ends soon, with the right status,
a line that names the cause, nothing left of it, and records that parse."""

import signal
import subprocess
import time

import pytest

from fault_runs import ENDLESS, Run, listening_sockets, read_records, wait_until

END_S = 10  # what is promised after a death or a signal

# Layouts as (ranks, groups); a round every other step.
ONE_GROUP, TWO_GROUPS = (3, 1), (4, 2)


def start(workplace, folder, layout, *settings):
    """A run that has trained for a few steps."""
    ranks, groups = layout
    run = Run(folder, "train", workplace / "run.toml", "--ranks", ranks,
              settings=(f"training.steps={ENDLESS}", f"parallelism.groups={groups}", "federation.every=2", *settings))
    try:
        run.wait_for("step", 5)
    except BaseException:
        run.__exit__()
        raise
    return run


def group_of(layout, rank):
    ranks, groups = layout
    return rank * groups // ranks


def assert_nothing_is_left(run, sockets, may_be_cut=False):
    assert run.alive() == {}
    # The kernel closes a dead process's files a moment after its memory is gone.
    wait_until(lambda: not sockets & listening_sockets(), END_S, "ports are free")
    records = read_records(run.folder, may_be_cut)
    kinds = [record["kind"] for record in records]
    assert kinds.count("start") == 1 and "end" not in kinds


@pytest.mark.parametrize("layout, victim",
                         [(layout, rank) for layout in (ONE_GROUP, TWO_GROUPS) for rank in range(layout[0])])
def test_a_killed_rank_ends_the_job(workplace, tmp_path, moments, layout, victim):
    with start(workplace, tmp_path, layout) as run:
        sockets = listening_sockets(run.alive())
        assert len(sockets) >= 2 + layout[0]  # the store, the coordinator, and at least one of each rank
        time.sleep(moments.uniform(0, 0.5))
        run.signal_rank(victim, signal.SIGKILL)
        assert run.status(END_S) == 4
        assert f"rank {victim} (group {group_of(layout, victim)}) was killed by SIGKILL" in run.error_line()
        assert_nothing_is_left(run, sockets)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM])
def test_another_signal_is_named_too(workplace, tmp_path, number):
    with start(workplace, tmp_path, ONE_GROUP) as run:
        run.signal_rank(1, number)
        assert run.status(END_S) == 4
        assert f"rank 1 (group 0) was killed by {number.name}" in run.error_line()
        assert run.alive() == {}


@pytest.mark.parametrize("layout, victim", [(ONE_GROUP, 0), (TWO_GROUPS, 3)])
def test_a_stopped_rank_ends_the_job_after_the_timeout(workplace, tmp_path, moments, layout, victim):
    timeout_s, grace_s = 5, 15  # the grace: verdict, last words, and SIGKILL for who doesn't heed SIGTERM
    with start(workplace, tmp_path, layout, f"comm.timeout_s={timeout_s}") as run:
        sockets = listening_sockets(run.alive())
        time.sleep(moments.uniform(0, 0.5))
        run.signal_rank(victim, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            run.status(timeout_s / 2)  # who is merely slow has until then
        assert run.status(timeout_s + grace_s) == 4
        line = run.error_line()
        # Stopped between two collectives while the others wait for the coordinator, it is missed by its heartbeats.
        silent = [f"rank {victim} (group {group_of(layout, victim)}): {words}" for words in ("fell silent", "sent nothing")]
        assert any(words in line for words in silent), line
        assert f"in group {group_of(layout, victim)}, rank" in line and "last told of" in line
        if "fell silent" in line:
            assert " failed while waiting for rank " in line and f"{1000 * timeout_s}ms" in line
        assert_nothing_is_left(run, sockets)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all(workplace, tmp_path, number):
    with start(workplace, tmp_path, TWO_GROUPS) as run:
        sockets = listening_sockets(run.alive())
        run.process.send_signal(number)
        assert run.status(END_S) == 128 + number
        assert run.error_line() == f"stopped by {number.name}"
        assert_nothing_is_left(run, sockets)


def test_a_second_signal_does_not_wait_for_ranks(workplace, tmp_path):
    with start(workplace, tmp_path, ONE_GROUP) as run:
        sockets = listening_sockets(run.alive())
        for rank in range(ONE_GROUP[0]):  # so that none of them heeds the first signal
            run.signal_rank(rank, signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            run.status(1)
        run.process.send_signal(signal.SIGINT)
        assert run.status(END_S) == 128 + signal.SIGINT
        assert_nothing_is_left(run, sockets)


def test_ranks_go_with_a_killed_launcher(workplace, tmp_path):
    with start(workplace, tmp_path, TWO_GROUPS) as run:
        sockets = listening_sockets(run.alive())
        run.process.kill()
        assert run.status(END_S) == -signal.SIGKILL
        wait_until(lambda: run.alive() == {}, END_S, "the ranks end")
        assert_nothing_is_left(run, sockets, may_be_cut=True)
