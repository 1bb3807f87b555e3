"""`fedshard train --dry-run`: starts nothing, allocates nothing, and prints a config again."""

import re

import pytest

from multi_harness import BINARY, run_process


def dry_run(program, path, ranks, *overrides):
    sets = [word for override in overrides for word in ("--set", override)]
    return run_process([BINARY, "train", path, "--ranks", ranks, "--dry-run", *sets], program.environment())


def test_a_large_model_on_512_ranks(program):
    path, run_folder = program.config(
        model={"hf": "", "preset": "llama3.1-70b"}, training={"dtype": "bf16", "seq_len": 4096, "local_batch_size": 1},
        parallelism={"groups": 4, "data_parallel_shard_degree": 64, "data_parallel_replicate_degree": 2})
    text = path.read_text().replace('hf = ""\n', "")
    path.write_text(text)
    done = dry_run(program, path, 512)
    assert done.returncode == 0, done.stderr
    assert "fl+hsdp: 512 ranks = 4 groups x 2 replicas x 64 shards" in done.stdout
    assert "70553706496 parameters" in done.stdout
    # fp32 shards: 70.55e9 * 4 / 64 bytes.
    assert re.search(r"# parameters +4\.1\d GiB", done.stdout), done.stdout
    # 2 (G-1) N 4 bytes between the groups.
    assert "1.54 TiB between groups" in done.stdout
    assert not run_folder.exists()

    again = program.folder / "again.toml"
    again.write_text(done.stdout)
    assert dry_run(program, again, 512).stdout == done.stdout


@pytest.mark.parametrize("further", [(), ("training.master_dtype=bf16",), ("parallelism.groups=[1,3]",),
                                     ("federation.compress=int4", "parallelism.groups=[1,3]"),
                                     ("federation.compress=topk", "federation.block=64", "federation.top_k=3"),
                                     ("federation.start_step=2", "training.master_dtype=bf16"),
                                     ("federation.start_step=2", "federation.compress=int8", "parallelism.groups=[1,3]"),
                                     ("federation.every=[2,1]", "federation.start_step=2", "parallelism.groups=[1,3]")],
                         ids=["equal groups", "bf16 masters", "unequal groups", "int4", "topk", "a warm-up",
                              "a warm-up before int8", "a group that makes half the steps"])
def test_what_is_predicted_is_what_is_sent(further, program):
    """The table's bytes of all steps are those that a run counts (its counters are exact; the table is rounded)."""
    overrides = ["training.steps=4", "lr_scheduler.warmup_steps=0", "parallelism.groups=2", "federation.every=2", *further]
    path, _ = program.config()
    said = re.search(r"# 4 steps +([\d.]+) (\w+) in groups .*?, ([\d.]+) (\w+) between groups",
                     dry_run(program, path, 4, *overrides).stdout)
    unit = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    run = program.train(4, overrides)
    before_evaluation = run.of("traffic")[-2]
    assert before_evaluation["step"] == 4
    inside = before_evaluation["intra_group"] - (before_evaluation["control"] -
                                                 (before_evaluation["inter_group"] - before_evaluation["aggregate"]))
    for number, name, measured in ((said[1], said[2], inside), (said[3], said[4], before_evaluation["aggregate"])):
        assert abs(float(number) * unit[name] - measured) <= 0.005 * measured


def test_a_run_on_gpus_can_be_tried_where_there_are_none(program):
    """Also what needs them: moments in the host's memory. Without --dry-run a build without CUDA refuses."""
    path, _ = program.config(comm={"backend": "nccl"}, optimizer={"offload": True})
    done = dry_run(program, path, 2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"# optimizer moments +[\d.]+ KiB \(host\)", done.stdout), done.stdout
    assert re.search(r"# total on the host +[\d.]+ KiB", done.stdout), done.stdout
    if "FEDSHARD_CUDA:BOOL=ON" in (BINARY.parent / "CMakeCache.txt").read_text():
        return
    done = run_process([BINARY, "train", path, "--ranks", 2], program.environment())
    assert done.returncode == 2 and 'backend = "nccl" needs a build with CUDA' in done.stderr, done.stderr


def test_an_impossible_layout_is_refused(program):
    path, _ = program.config()
    done = dry_run(program, path, 5, "parallelism.groups=2")
    assert done.returncode == 2
    assert "5" in done.stderr and "2" in done.stderr and done.stderr.count("\n") == 1
