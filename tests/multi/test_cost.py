"""`fedshard cost --json` against figures that were derived twice by hand: by closed forms, and by counting messages."""

import json
import os

import pytest

from multi_harness import BINARY, Run, run_process

UNITS = ["--units", "960,480,480", "--bytes-reduce", "2", "--bytes-aggregate", "2"]
ROOT = [*UNITS, "--keep-root"]
LLAMA = ["--model", "llama3.1-8b", "--ranks", "512", "--bytes-reduce", "2", "--bytes-aggregate", "2", "--batch", "2"]

# arguments, figures
CASES = {
    "ddp_8": ([*ROOT, "--ranks", "8", "--shard", "1"], {"train_sent": 6720, "train_msgs": 42, "colls": 3}),
    "fsdp_8": ([*ROOT, "--ranks", "8", "--view-group", "4"],
               {"train_sent": 8400, "train_msgs": 56, "colls": 8, "step_cross": "16800"}),
    "fsdp_8_noroot": ([*UNITS, "--ranks", "8", "--no-keep-root"],
                      {"train_sent": 10080, "train_msgs": 63, "colls": 9}),
    "fsdp_8_zero2": ([*ROOT, "--ranks", "8", "--no-reshard"], {"train_sent": 6720, "train_msgs": 42, "colls": 6}),
    "hsdp_16_4": ([*ROOT, "--ranks", "16", "--shard", "4", "--view-group", "8"],
                  {"train_sent": 8640, "train_msgs": 42, "colls": 11, "step_cross": "11520"}),
    "flfsdp_16_4": ([*ROOT, "--ranks", "16", "--groups", "4", "--every", "4"],
                    {"train_sent": 7200, "train_msgs": 24, "colls": 8, "agg_sent_max": 1440, "agg_total": 23040,
                     "step_cross": "5760"}),
    "ratio_16": ([*ROOT, "--ranks", "16", "--groups", "4", "--every", "4"],
                 {"flat": 36000, "fl": "5760", "ratio": "4/25"}),
    "flhsdp_32_naive": ([*ROOT, "--ranks", "32", "--groups", "2", "--shard", "4", "--every", "1", "--scheme", "naive"],
                        {"train_sent": 8640, "agg_sent_max": 960, "agg_total": 30720, "agg_cross": 30720}),
    "flhsdp_32_split": ([*ROOT, "--ranks", "32", "--groups", "2", "--shard", "4", "--every", "1"],
                        {"train_sent": 8640, "agg_sent_max": 960, "agg_total": 30720, "agg_cross": 7680}),
    "asym_4_6": (["--units", "1200", "--groups", "4,6", "--bytes-aggregate", "2"],
                 {"agg_total": 4800, "agg_sent_max": 600}),
    "llama8b_fsdp_512": (LLAMA, {"train_sent": 45990212576, "train_msgs": 51100, "colls": 100,
                                 "batch_update": [1024]}),
    "llama8b_hsdp_512_4": ([*LLAMA, "--shard", "4"],
                           {"shard_sent": 34560159744, "replica_sent": 7967524832, "colls": 134}),
    "llama8b_flfsdp_512_4_8": ([*LLAMA, "--groups", "128", "--every", "8"],
                               {"train_sent": 34560159744, "agg_sent": 7967524832, "agg_msgs": 254,
                                "agg_per_step": "995940604", "batch_update": [8] * 128, "batch_round": 8192}),
    "batch_bound of fl+hsdp": ([*LLAMA, "--groups", "16", "--shard", "4"], {"batch_update": [64] * 16}),
}


def cost(*arguments):
    return run_process([BINARY, "cost", *map(str, arguments)], dict(os.environ))


@pytest.mark.parametrize("name", CASES)
def test_figures(name):
    arguments, expected = CASES[name]
    done = cost(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {key: found[key] for key in expected} == expected
    assert cost(*arguments).returncode == 0  # and as a table


@pytest.mark.parametrize("arguments, words", [
    ([], "cost of what?"),
    (["--model", "llama-tiny"], "--ranks is missing"),
    (["--model", "llama-huge", "--ranks", 2], "llama-huge"),
    (["--model", "llama-tiny", "--units", "3", "--ranks", 2], "leave --model out"),
    (["--units", "0", "--ranks", 2], "at least 1 element"),
    (["--units", "5", "--ranks", 7, "--groups", 2], "7 ranks cannot be split into 2 equal groups"),
    (["--units", "5", "--ranks", 4, "--bytes-gather", 3], "2 bytes (bf16) or 4 (fp32)"),
    (["--units", "5", "--ranks", 6, "--algorithm", "recursive"], "power of two"),
    (["--units", "5", "--ranks", 4, "--nodes-per-cell", 2], "--ranks-per-node"),
    (["--units", "5", "--ranks", 4, "--view-group", 5], "--view-group 5"),
    (["--units", "5", "--ranks", 4, "--groups", 2, "--every", 0], "every"),
    (["missing.toml", "--ranks", 2], "missing.toml"),
])
def test_what_cannot_be_counted_is_refused(arguments, words):
    done = cost(*arguments)
    assert done.returncode == 2 and words in done.stderr, (done.returncode, done.stderr)


RUNS = {
    "ddp": (2, {}, {}),
    "fsdp": (3, {"data_parallel_shard_degree": 3}, {}),
    "hsdp": (4, {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}, {}),
    "fl+ddp": (3, {"groups": 3, "data_parallel_shard_degree": 1}, {"every": 2, "compress": "int8"}),
    "fl+fsdp, unequal": (4, {"groups": [1, 3]}, {"every": [4, 2]}),
    "fl+fsdp, fragments": (4, {"groups": 2}, {"every": 4, "fragments": 2, "compress": "topk"}),
    "fl+hsdp, leader, buckets": (6, {"groups": [2, 4], "data_parallel_shard_degree": [2, 2],
                                     "data_parallel_replicate_degree": [1, 2]},
                                 {"every": 3, "scheme": "leader", "bucket": "4KiB", "start_step": 2}),
}


@pytest.mark.parametrize("name", RUNS)
def test_bytes_of_a_config_are_those_of_its_run(name, program):
    ranks, parallelism, federation = RUNS[name]
    path, run_folder = program.config(parallelism=parallelism, federation=federation, data={"eval": None},
                                      training={"local_batch_size": 1, "steps": 8, "gradient_accumulation_steps": 2})
    program.result(run_process([BINARY, "train", path, "--ranks", ranks], program.environment()), run_folder)
    traffic = Run(run_folder).traffic()
    done = cost(path, "--ranks", ranks, "--json")
    assert done.returncode == 0, done.stderr
    foretold = json.loads(done.stdout)["run"]
    purposes = ("gather", "reduce", "replica", "aggregate")
    assert {p: foretold[p] for p in purposes} == {p: traffic[p] for p in purposes}
    assert sum(foretold[p] for p in purposes) > 0
