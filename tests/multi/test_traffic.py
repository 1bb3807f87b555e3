"""The traffic record is exact: bytes by purpose equal closed forms, and the network interface's counters bear them out.

N_u elements of unit u, s_u = ceil(N_u / F), groups G of R replicas of F shards, P = G R F ranks; b_g, b_r bytes of an
element gathered or reduced. A ring of n that moves chunks of s elements sends n (n - 1) s of them in all, so over all
ranks:
  gather     P (F - 1) s_u b_g for each gather of a unit: two a micro-step, one for first and last unit, and one for all
             where units stay gathered; in a pass of evaluation one
             With Muon, 4 P (F - 1) s_u more a step for each block, whose matrices its update needs whole
  reduce     P (F - 1) s_u b_r a micro-step
  replica    G F 2 (R - 1) s_u b_r a micro-step
  aggregate  a round: 2 (G - 1) N b_a between groups, and G (R - 1) N b_a inside them, where replicas share their
             slices; b_a bytes of a master parameter
             With scheme = "naive" R times the bytes between groups and none inside; buckets change no figure
             A step of the warm-up: the same of fp32 gradients; the end of the warm-up: a round's
             Of averaged moments: the same of fp32, for each that an element has
  state      the same once for every evaluation that needs a mean: when steps were done since the last round
"""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from multi_harness import BINARY, MODEL, VOCABULARY, Run, run_process

def unit_sizes(hidden_size=32, intermediate_size=56, layers=2, heads=4, kv_heads=2, tied=False):
    """(elements, gathers of a micro-step when resharded) by unit, counted from the shapes of Llama's parameters."""
    head = hidden_size // heads
    attention = 2 * hidden_size * heads * head + 2 * hidden_size * kv_heads * head
    block = attention + 3 * hidden_size * intermediate_size + 2 * hidden_size
    table = VOCABULARY * hidden_size
    blocks = [(block, 2)] * layers
    if tied:
        return [(table + hidden_size, 1)] + blocks
    return [(table, 1)] + blocks + [(hidden_size + table, 1)]


def averaged_moments(units, tables, layers=2, hidden_size=32):
    """AdamW has two of each element; Muon one of each matrix of a block, and AdamW's of all else."""
    blocks = sum(numel for numel, gathers in units if gathers == 2) - layers * 2 * hidden_size
    return 2 * sum(numel for numel, _ in units) - (blocks if "optimizer" in tables else 0)


class Forecast:
    """Closed forms for one run; shapes: (replicas, shards) of each group."""

    def __init__(self, units, shapes, dtype="fp32", reduce_dtype="fp32", reshard=True, master_dtype="fp32",
                 scheme="split", moments=0):
        bytes_of = {"fp32": 4, "bf16": 2}
        self.units, self.shapes = units, shapes
        self.b_g, self.b_r, self.reshard = bytes_of[dtype], bytes_of[reduce_dtype], reshard
        self.b_a = bytes_of[master_dtype]
        self.naive = scheme == "naive"
        self.numel = sum(numel for numel, _ in units)
        self.moments = moments  # elements whose means go along with a round's

    def moved(self, gathers):
        """Elements that gathers of each unit move, `gathers(times)` times; its reductions move one gather's."""
        return sum(replicas * shards * (shards - 1) * math.ceil(numel / shards) * gathers(times)
                   for replicas, shards in self.shapes for numel, times in self.units)

    def between(self):
        copies = self.shapes[0][0] if self.naive else 1
        return 2 * (len(self.shapes) - 1) * copies * self.numel * self.b_a

    def inside(self):
        return 0 if self.naive else sum(replicas - 1 for replicas, _ in self.shapes) * self.numel * self.b_a

    def warm_up(self, steps):
        """How many rounds' bytes go into this many steps of the warm-up and its end."""
        return steps * 4 // self.b_a + 1 if steps else 0

    def of_moments(self, a_mean):
        return a_mean * 4 * self.moments // (self.b_a * self.numel)

    def bytes(self, micro_steps, reductions, rounds=0, eval_passes=0, means=0, muon_steps=0, own_rounds=0):
        once = self.moved(lambda times: 1)
        training = self.moved(lambda times: times if self.reshard else 1)
        ring = sum(2 * (replicas - 1) * shards * math.ceil(numel / shards)
                   for replicas, shards in self.shapes for numel, _ in self.units)
        a_mean = self.between() + (self.inside() if len(self.shapes) > 1 else 0)
        blocks = self.moved(lambda times: 1 if times == 2 else 0)
        return {"gather": (micro_steps * training + eval_passes * once) * self.b_g + muon_steps * blocks * 4,
                "reduce": reductions * once * self.b_r,
                "replica": reductions * ring * self.b_r,
                "aggregate": rounds * a_mean + own_rounds * self.of_moments(a_mean),
                "state": means * a_mean}


def by_purpose(record):
    return {purpose: record[purpose] for purpose in ("gather", "reduce", "replica", "aggregate", "state")}


TRAINING = {"local_batch_size": 2, "steps": 7, "gradient_accumulation_steps": 1}
EVALUATED = 17  # sequences in the evaluation file: ranks make ceil(ceil(17 / P) / 2) passes of 2

# name: (G, R, F), or (R, F) by group; further tables
RUNS = {
    "one rank": ((1, 1, 1), {}),
    "ddp": ((1, 3, 1), {"training": {"reduce_dtype": "bf16"}}),
    "fsdp": ((1, 1, 3), {}),
    "fsdp bf16, micro-steps": ((1, 1, 3), {"training": {"dtype": "bf16", "gradient_accumulation_steps": 3}}),
    "fsdp, reduced at the last micro-step": ((1, 1, 3), {"training": {"gradient_accumulation_steps": 3,
                                                                      "reduce_each_micro_step": False}}),
    "hsdp, everything recomputed": ((1, 2, 2), {"training": {"activation_checkpoint": "full"},
                                                "parallelism": {"prefetch": 2}}),
    "fsdp, kept gathered": ((1, 1, 2), {"parallelism": {"fsdp_reshard_after_forward": False}}),
    "fsdp, tied": ((1, 1, 3), {"model": {"tie_word_embeddings": True}}),
    "fsdp, muon": ((1, 1, 3), {"training": {"gradient_accumulation_steps": 2},
                               "optimizer": {"name": "muon", "lr": 1e-3}}),
    "hsdp": ((1, 2, 2), {"training": {"dtype": "bf16", "reduce_dtype": "bf16"}}),
    "fl+ddp": ((2, 2, 1), {}),
    "fl+fsdp": ((2, 1, 3), {}),
    "fl+hsdp": ((2, 2, 2), {"training": {"dtype": "bf16"}}),
    "fl+fsdp, one rank and three": ([(1, 1), (1, 3)], {}),
    "fl+hsdp, unequal": ([(2, 2), (1, 3)], {"training": {"dtype": "bf16"}}),
    "fl+hsdp, unequal replicas": ([(2, 2), (1, 2), (1, 2)], {}),
    "fl+hsdp, bf16 masters": ((2, 2, 2), {"training": {"dtype": "bf16", "master_dtype": "bf16"}}),
    "fl+hsdp, leaders in buckets": ([(2, 2), (1, 2)], {"federation": {"scheme": "leader", "bucket": "8KiB"}}),
    "fl+hsdp, naive": ((2, 2, 2), {"federation": {"scheme": "naive", "start_step": 1}}),
    "fl+hsdp, averaged moments": ([(2, 2), (1, 2)], {"federation": {"inner_state": "average"}}),
    "fl+fsdp, averaged moments of muon": ([(1, 1), (1, 3)], {"federation": {"inner_state": "average"},
                                                             "optimizer": {"name": "muon", "lr": 1e-3}}),
    "fl+fsdp, FedProx": ((2, 1, 2), {"federation": {"prox_mu": 0.1}}),
    "fl+fsdp, a warm-up": ((2, 1, 3), {"federation": {"start_step": 2}}),
    "fl+hsdp, a warm-up": ((2, 2, 2), {"federation": {"start_step": 2},
                                       "training": {"dtype": "bf16", "master_dtype": "bf16"}}),
    "fl+hsdp, unequal, a warm-up": ([(2, 2), (1, 3)], {"federation": {"start_step": 2}}),
    "fl+fsdp, nothing but a warm-up": ([(1, 1), (1, 3)], {"federation": {"start_step": 7}}),
    "fsdp, no groups to warm up": ((1, 1, 3), {"federation": {"start_step": 2, "prox_mu": 0.1}}),
}


@pytest.mark.parametrize("name", RUNS)
def test_bytes_equal_closed_forms(name, program):
    spec, tables = RUNS[name]
    shapes = spec if isinstance(spec, list) else [spec[1:]] * spec[0]
    groups, ranks = len(shapes), sum(replicas * shards for replicas, shards in shapes)
    training = {**TRAINING, **tables.get("training", {})}
    reshard = tables.get("parallelism", {}).get("fsdp_reshard_after_forward", True)
    tied = tables.get("model", {}).get("tie_word_embeddings", False)
    run = program.train(ranks, model={"hf": None, "preset": "llama-tiny", **MODEL, "tie_word_embeddings": tied},
                        training=training, optimizer=tables.get("optimizer", {}),
                        federation={"every": 3, **tables.get("federation", {})},
                        validation={"interval": 3},
                        parallelism={"groups": [replicas * shards for replicas, shards in shapes],
                                     "data_parallel_shard_degree": [shards for _, shards in shapes],
                                     "data_parallel_replicate_degree": [replicas for replicas, _ in shapes],
                                     **tables.get("parallelism", {})})
    units = unit_sizes(tied=tied)
    assert run.start["params"] == sum(numel for numel, _ in units)
    forecast = Forecast(units, shapes, training.get("dtype", "fp32"),
                        training.get("reduce_dtype", "fp32"), reshard, training.get("master_dtype", "fp32"),
                        tables.get("federation", {}).get("scheme", "split"),
                        averaged_moments(units, tables) if tables.get("federation", {}).get("inner_state") else 0)
    passes = math.ceil(math.ceil(EVALUATED / ranks) / training["local_batch_size"])
    micro_steps = training["gradient_accumulation_steps"]
    reductions = micro_steps if training.get("reduce_each_micro_step", True) else 1
    federated = groups > 1

    # An evaluation asks for a mean unless groups are equal: at a round's end, or in the warm-up.
    start = tables.get("federation", {}).get("start_step", 0) if federated else 0
    rounds = [step for step in range(start + 3, 8, 3) if federated]
    means = [step for step in (3, 6, 7) if federated and step > start and step not in rounds]
    warm_up = forecast.warm_up(start)
    is_muon = tables.get("optimizer", {}).get("name") == "muon"
    at_rounds = [(r["step"], by_purpose(r)) for r in run.of("traffic")[:-1]]
    assert at_rounds == [(step, forecast.bytes(step * micro_steps, step * reductions, warm_up + i + 1,
                                               sum(e < step for e in (3, 6)) * passes, sum(m < step for m in means),
                                               step if is_muon else 0, i + 1))
                         for i, step in enumerate(rounds)]
    last = run.traffic()
    assert last["step"] == 7
    assert by_purpose(last) == forecast.bytes(7 * micro_steps, 7 * reductions, warm_up + len(rounds), 3 * passes,
                                               len(means), 7 if is_muon else 0, len(rounds))

    # Between groups go the parts that are averaged, and a few numbers at rounds and evaluations.
    averaged = ((warm_up + len(rounds) + len(means)) * forecast.between() +
                len(rounds) * forecast.of_moments(forecast.between()))
    assert averaged <= last["inter_group"] <= averaged + last["control"]
    assert last["intra_group"] + last["inter_group"] == sum(by_purpose(last).values()) + last["control"]
    assert (last["control"] > 0) == (ranks > 1)


# Runs its arguments in a network namespace whose only interface is a loopback of its own, and prints the bytes that
# went over it. Started by `unshare`.
INSIDE = """
import fcntl, json, socket, struct, subprocess, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up, running
def sent():
    for line in open("/proc/net/dev"):
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
before = sent()
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
print(json.dumps({"status": done.returncode, "stderr": done.stderr, "bytes": sent() - before}))
"""


def namespace_command():
    """How to enter a network namespace here, or a skip that says why there is no way."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command on this machine")
    options = ["--net"] if os.geteuid() == 0 else ["--map-root-user", "--net"]
    probe = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"network namespaces are forbidden here: {probe.stderr.strip()}")
    return ["unshare", *options]


def test_the_interface_counts_the_same_bytes(program):
    """Everything that the ranks say to each other, and no more than 2 % beside it: protocol headers, the coordinator,
    the store. Units are big, so that headers are few; a collective that moved its data twice would be far beyond."""
    enter = namespace_command()
    big = {"hf": None, "preset": "llama-tiny", **MODEL, "hidden_size": 256, "intermediate_size": 700}
    path, run_folder = program.config(model=big, training={"local_batch_size": 1, "steps": 6}, federation={"every": 2},
                                      parallelism={"groups": 2, "data_parallel_shard_degree": 2})
    done = run_process([*enter, sys.executable, "-c", INSIDE, BINARY, "train", path, "--ranks", 4],
                       program.environment())
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == 0, report["stderr"]
    traffic = Run(run_folder).traffic()
    payload = traffic["intra_group"] + traffic["inter_group"]
    assert payload > 50_000_000
    assert payload <= report["bytes"] <= 1.02 * payload
