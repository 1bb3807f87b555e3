"""Whatever way a round's exchange goes, its bits are the same: every scheme, in buckets and whole, in runs of the real
program."""

import pytest

from multi_harness import BINARY, run_process

EQUAL = {"groups": [4, 4], "data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}
UNEQUAL = {"groups": [4, 2], "data_parallel_shard_degree": 2, "data_parallel_replicate_degree": [2, 1]}


def numbers(program, ranks, parallelism, **federation):
    run = program.train(ranks, training={"local_batch_size": 2, "steps": 7}, parallelism=parallelism,
                        federation={"every": 2, **federation})
    return run.numbers_as_text()


@pytest.mark.parametrize("federation", [{"scheme": "leader"}, {"scheme": "naive", "bucket": "unit", "concurrency": 1},
                                        {"scheme": "naive", "outer": "nesterov"},
                                        {"scheme": "leader", "bucket": "4KiB", "delay": 1, "mix": 0.5, "fragments": 2}])
def test_schemes_have_the_bits_of_split(program, federation):
    plain = {key: value for key, value in federation.items() if key not in ("scheme", "bucket", "concurrency")}
    assert numbers(program, 8, EQUAL, **federation) == numbers(program, 8, EQUAL, **plain)


def test_leaders_of_unequal_replicas(program):
    leader = numbers(program, 6, UNEQUAL, scheme="leader", bucket="1KiB", concurrency=4)
    assert leader == numbers(program, 6, UNEQUAL)


def test_bucketed_compression_agrees_everywhere(program):
    """Blocks end with their parts, so other buckets lead to other bits; every run ends with all digests equal."""
    for scheme in ("split", "leader", "naive"):
        rounds = numbers(program, 8, EQUAL, scheme=scheme, bucket="2KiB", compress="int8")[2]
        assert [step for step, _ in rounds] == [2, 4, 6]


def test_naive_needs_as_many_replicas_in_each_group(program):
    path, run_folder = program.config(parallelism=UNEQUAL, federation={"every": 2, "scheme": "naive"})
    done = run_process([BINARY, "train", path, "--ranks", 6], program.environment())
    assert done.returncode == 2 and not run_folder.exists()
    assert 'scheme = "naive" pairs the replicas of all groups, but group 0 has 2 and group 1 has 1' in done.stderr
