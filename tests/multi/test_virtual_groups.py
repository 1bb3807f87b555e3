"""Virtual groups train in the processes of one group what real groups train in processes of their own, to the bit."""

import os
import signal
import subprocess
import sys
import time

import pytest

from multi_harness import BINARY, free_port, run_process

DDP = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": -1}

# name: groups, ranks of a group, tables
CASES = {
    "two groups of one rank": (2, 1, {}),
    "three groups of one rank": (3, 1, {"federation": {"weights": [3, 1, 2]}}),
    "two groups of two shards": (2, 2, {}),
    "two groups of two replicas": (2, 2, {"parallelism": DDP}),
    "two groups of three ranks": (2, 3, {}),
    "other shards in each group": (2, 2, {"parallelism": {"data_parallel_shard_degree": [2, 1],
                                                          "data_parallel_replicate_degree": -1}}),
    "nesterov, int8": (2, 2, {"federation": {"outer": "nesterov", "outer_max_norm": 1.0, "compress": "int8",
                                             "block": 64, "inner_state": "reset"}}),
    "validation in mid-round": (2, 2, {"validation": {"interval": 3}}),
    "gradient accumulation": (2, 1, {"training": {"gradient_accumulation_steps": 3}}),
}


def tables_of(case):
    return {**case, "training": {"local_batch_size": 2, "steps": 10, **case.get("training", {})},
            "federation": {"every": 4, **case.get("federation", {})}}


def with_groups(tables, groups):
    return {**tables, "parallelism": {"groups": groups, **tables.get("parallelism", {})}}


def train_virtually(program, groups, ranks, **tables):
    path, run_folder = program.config(**tables)
    command = [BINARY, "train", path, "--ranks", ranks, "--virtual-groups", groups]
    return program.result(run_process(command, program.environment()), run_folder)


def what_was_trained(run):
    """All that the records say but for times, the processes' memory, and the order in which groups came to a step."""
    times = ("time_s", "seconds", "exposed_seconds", "tokens_per_s", "peak_rss_bytes", "peak_tensor_bytes")
    records = [{key: value for key, value in record.items() if key not in times} for record in run.records]
    return sorted(records, key=lambda r: (r["step"], r["kind"], r.get("group", 0)))


@pytest.mark.parametrize("name", CASES)
def test_virtual_groups_equal_real_ones(name, program):
    groups, ranks, case = CASES[name]
    tables = tables_of(case)
    real = program.train(groups * ranks, **with_groups(tables, groups))
    virtual = train_virtually(program, groups, ranks, **tables)
    assert virtual.start["world"] == groups * ranks and virtual.start["groups"] == [ranks] * groups
    assert len(virtual.of("round")) == 2 and len(virtual.of("step")) == 10 * groups
    assert virtual.numbers_as_text() == real.numbers_as_text()
    assert what_was_trained(virtual) == what_was_trained(real)
