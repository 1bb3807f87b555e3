"""Virtual groups train in the processes of one group what real groups train in processes of their own, to the bit."""

import subprocess

import pytest

from multi_harness import BINARY, finish, free_port, run_process

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
    "averaged moments": (2, 2, {"federation": {"inner_state": "average", "scheme": "leader"},
                                "optimizer": {"name": "muon", "lr": 1e-3}}),
    "validation in mid-round": (2, 2, {"validation": {"interval": 3}}),
    "gradient accumulation": (2, 1, {"training": {"gradient_accumulation_steps": 3}}),
    "a warm-up and FedProx": (2, 2, {"federation": {"start_step": 2, "prox_mu": 0.1}}),
    "norms of each group's own": (2, 2, {"federation": {"exclude": ["*norm*"]}}),
    "rounds beside training": (3, 1, {"federation": {"delay": 2, "mix": 0.25, "outer": "nesterov"}}),
    "fragments": (2, 2, {"federation": {"delay": 1, "fragments": 2}}),
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
    assert len(virtual.of("round")) >= 2 and len(virtual.of("step")) == 10 * groups
    assert virtual.numbers_as_text() == real.numbers_as_text()
    assert what_was_trained(virtual) == what_was_trained(real)


def test_one_virtual_group_is_the_plain_run(program):
    tables = tables_of({"validation": {"interval": 3}})
    plain, virtual = program.train(2, **tables), train_virtually(program, 1, 2, **tables)
    assert plain.start["strategy"] == "fsdp"
    assert virtual.lines and virtual.numbers_as_text() == plain.numbers_as_text()
    assert what_was_trained(virtual) == what_was_trained(plain)


def test_ranks_log_apart(program):
    """Also what they say in rounds beside training, on another thread."""
    run = train_virtually(program, 2, 2, **tables_of({"federation": {"delay": 1, "guard": 1},
                                                      "metrics": {"trace": True}}))
    left_out = [r for r in run.of("round") if r["left_out"]]
    logs = {0: run.folder / "log.txt", **{rank: run.folder / "ranks" / f"{rank}.log.txt" for rank in (1, 2, 3)}}
    for rank, log in logs.items():
        text = log.read_text()
        assert f"[rank {rank}] rank {rank} of 4, store at " in text and "fl+fsdp: 4 ranks" in text
        assert f"one of 2 ranks in process {rank % 2} of 2" in text
        assert not any(f"[rank {other}]" in text for other in logs if other != rank)
        assert text.count(" leaves out group ") == len(left_out) > 0
    assert len(list(run.folder.glob("**/*trace*.json"))) == 4


def run_by_hand(program, path, *options):
    """The ends of processes, one for each list of options, with the variables of torchrun and no agent behind them; the
    first hosts the coordinator."""
    place = {"WORLD_SIZE": len(options), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [subprocess.Popen([str(part) for part in (BINARY, "train", path, *its_own)], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                                  env=program.environment(RANK=process, LOCAL_RANK=process, **place))
                 for process, its_own in enumerate(options)]
    return [finish(process) for process in processes]


def test_another_launcher(program):
    """Each process gets the same argument. One rank of all hosts the coordinator."""
    tables = tables_of({"validation": {"interval": 3}})
    own = train_virtually(program, 2, 2, **tables)
    path, run_folder = program.config(**tables)
    done = run_by_hand(program, path, *[["--virtual-groups", 2]] * 2)
    assert [d.returncode for d in done] == [0, 0], [d.stderr for d in done]
    assert "rank 0 of 4" in done[0].stderr and "one of 2 ranks in process 0 of 2" in done[0].stderr
    run = program.result(done[0], run_folder)
    assert run.numbers_as_text() == own.numbers_as_text() and what_was_trained(run) == what_was_trained(own)


def test_activations_are_those_of_one_group(program):
    """Four groups in one process, of a model whose activations outweigh all else: the most that tensors took is far
    below four ranks' memory."""
    run = train_virtually(program, 4, 1, training={"local_batch_size": 24, "steps": 5}, federation={"every": 2},
                          validation={"interval": 2})
    memory = run.start["memory"]
    assert memory["activations"] > 0.7 * sum(memory.values())
    state = sum(memory.values()) - memory["activations"]
    assert run.records[-1]["peak_tensor_bytes"] < 1.02 * (4 * state + memory["activations"])


@pytest.mark.parametrize("virtual, parallelism, comm, words", [
    (0, {}, {}, "must be a whole number from 1, not '0'"),
    ("two", {}, {}, "must be a whole number from 1, not 'two'"),
    (2, {"groups": 3}, {}, "--virtual-groups 2 makes 2 groups, but [parallelism] groups is 3"),
    (2, {"groups": [1, 3]}, {}, "--virtual-groups 2 makes 2 equal groups, but [parallelism] groups is [1, 3]"),
    (2, {"groups": [3, 3]}, {}, "[parallelism] 4 ranks cannot be split into groups of 3 and 3"),
    (2, {}, {"backend": "nccl"}, "--virtual-groups runs several ranks in a process"),
    (4097, {}, {}, "--virtual-groups must be at most 4096, not 4097")])
def test_wrong_use(virtual, parallelism, comm, words, program):
    path, run_folder = program.config(parallelism=parallelism, comm=comm)
    done = run_process([BINARY, "train", path, "--ranks", 2, "--virtual-groups", virtual], program.environment())
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert done.stderr.startswith("fedshard: ") and done.stderr.count("\n") == 1
    assert not run_folder.exists()


def test_processes_must_agree(program):
    path, _ = program.config(**tables_of({}))
    for done in run_by_hand(program, path, ["--virtual-groups", 2], []):
        assert done.returncode == 2 and " has another configuration than rank " in done.stderr, done.stderr


def test_a_dry_run_is_that_of_real_groups(program):
    def dry_run(*options):
        done = run_process([BINARY, "train", path, *options, "--dry-run"], program.environment())
        assert done.returncode == 0, done.stderr
        return done.stdout

    path, run_folder = program.config(**tables_of({}))
    virtual = dry_run("--ranks", 2, "--virtual-groups", 3)
    assert "fl+fsdp: 6 ranks" in virtual
    assert virtual == dry_run("--ranks", 6, "--set", "parallelism.groups=3")
