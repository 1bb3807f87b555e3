"""A round happens for all groups or for none, whenever a rank dies: no record of a round lacks a group, rounds are
recorded without a gap, and the groups were never found with different parameters."""

import signal
import time

import pytest

from fault_runs import ENDLESS, Run, read_records

RANKS = 4


# Sizes and shards of the groups, and further settings. With one shard, each rank's replica exchanges a half of it.
LAYOUTS = {
    "replicas": ([2, 2], [1, 1], ()),
    "shards": ([2, 2], [2, 2], ("federation.outer=nesterov",)),
    "one and three": ([1, 3], [1, 3], ("training.master_dtype=bf16",)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attempt", range(3))
def test_a_death_in_a_round(workplace, tmp_path, moments, layout, attempt):
    sizes, shards, further = LAYOUTS[layout]
    settings = (f"training.steps={ENDLESS}", f"parallelism.groups={sizes}", "federation.every=1",
                f"parallelism.data_parallel_shard_degree={shards}", "parallelism.data_parallel_replicate_degree=-1",
                *further)
    with Run(tmp_path, "train", workplace / "run.toml", "--ranks", RANKS, settings=settings) as run:
        run.wait_for("round", 2)
        time.sleep(moments.uniform(0, 1))
        victim = moments.randrange(RANKS)
        run.signal_rank(victim, signal.SIGKILL)
        assert run.status(10) == 4
        # A run with bf16 masters has given a warning before its start, which is not what the dead rank said last.
        *warnings, error = run.errors().splitlines()
        assert len(warnings) == len([setting for setting in further if "bf16" in setting])
        assert f"rank {victim} (group {int(victim >= sizes[0])}) was killed by SIGKILL" in error
        assert "warning" not in error
        assert run.alive() == {}
        said = run.errors() + "".join(path.read_text() for path in (run.folder / "ranks").iterdir())
        assert "do not hold the same parameters" not in said and "out of step" not in said

        records = read_records(run.folder)
        rounds = [record for record in records if record["kind"] == "round"]
        assert [record["round"] for record in rounds] == list(range(1, len(rounds) + 1))
        for record in rounds:
            assert record["participants"] == [0, 1] and record["weights"] == [size / RANKS for size in sizes]
            assert record["step"] == record["round"] and len(record["digest"]) == 16
        # Nobody trains on before a round is over, so no group is more than a step ahead.
        for group in (0, 1):
            steps = [record["step"] for record in records if record["kind"] == "step" and record["group"] == group]
            assert steps == list(range(1, len(steps) + 1)) and len(rounds) <= len(steps) <= len(rounds) + 1
