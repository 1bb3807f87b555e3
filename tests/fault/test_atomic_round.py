"""A round happens for all groups or for none, whenever a rank dies: no record of a round lacks a group, rounds are
recorded without a gap, and the groups were never found with different parameters."""

import signal
import time

import pytest

from fault_runs import ENDLESS, Run, read_records

RANKS = 4


@pytest.mark.parametrize("shards", [1, 2])  # of each group: with 1, each rank's replica exchanges a half of it
@pytest.mark.parametrize("attempt", range(3))
def test_a_death_in_a_round(workplace, tmp_path, moments, shards, attempt):
    settings = (f"training.steps={ENDLESS}", "parallelism.groups=2", "federation.every=1",
                f"parallelism.data_parallel_shard_degree={shards}", "parallelism.data_parallel_replicate_degree=-1")
    with Run(tmp_path, "train", workplace / "run.toml", "--ranks", RANKS, settings=settings) as run:
        run.wait_for("round", 2)
        time.sleep(moments.uniform(0, 1))
        victim = moments.randrange(RANKS)
        run.signal_rank(victim, signal.SIGKILL)
        assert run.status(10) == 4
        assert f"rank {victim} (group {victim // 2}) was killed by SIGKILL" in run.error_line()
        assert run.alive() == {}
        said = run.errors() + "".join(path.read_text() for path in (run.folder / "ranks").iterdir())
        assert "do not hold the same parameters" not in said and "out of step" not in said

        records = read_records(run.folder)
        rounds = [record for record in records if record["kind"] == "round"]
        assert [record["round"] for record in rounds] == list(range(1, len(rounds) + 1))
        for record in rounds:
            assert record["participants"] == [0, 1] and record["weights"] == [0.5, 0.5]
            assert record["step"] == record["round"] and len(record["digest"]) == 16
        # Nobody trains on before a round is over, so no group is more than a step ahead.
        for group in (0, 1):
            steps = [record["step"] for record in records if record["kind"] == "step" and record["group"] == group]
            assert steps == list(range(1, len(steps) + 1)) and len(rounds) <= len(steps) <= len(rounds) + 1
