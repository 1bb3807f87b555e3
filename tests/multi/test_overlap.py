"""Rounds beside training (`delay`, `mix`) and in `fragments` equal the reference, send the same bytes, and over a slow
link cost training little time."""

import os
import shutil
import subprocess

import pytest

import reference
from multi_harness import BINARY, STEPS, Program, Run, assert_close, clean_environment
from test_federation import recipe

# name: ranks, sequences a step, [parallelism], [federation]
OVERLAPPED = {
    "delay": (2, 12, {"groups": 2}, {"every": 4, "delay": 2}),
    "delay of a whole round, half of one's own kept": (4, 12, {"groups": [2, 2]}, {"every": 3, "delay": 3, "mix": 0.5}),
    "fragments": (3, 12, {"groups": 3}, {"every": 4, "fragments": 4}),
    "fragments, delay and mix, unequal groups": (
        4, 12, {"groups": [1, 3]}, {"every": 6, "fragments": 2, "delay": 2, "mix": 0.25}),
    "nesterov in fragments with a delay": (
        4, 12, {"groups": 2, "data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2},
        {"every": 5, "fragments": 3, "delay": 1, "mix": 0.5, "outer": "nesterov"}),
}


@pytest.mark.parametrize("name", OVERLAPPED)
def test_equals_the_reference(name, program, corpus, weights):
    ranks, batch, parallelism, federation = OVERLAPPED[name]
    run = program.train(ranks, training={"local_batch_size": batch // ranks}, parallelism=parallelism,
                        federation=federation)
    sizes = run.start["groups"]
    known = {key: federation[key] for key in ("every", "delay", "mix", "fragments") if key in federation}
    expected = reference.train(recipe(corpus, weights, batch=batch, groups=len(sizes), max_norm=1.0, **known,
                                      shares=tuple(batch // ranks * size for size in sizes),
                                      averaging=tuple(size / ranks for size in sizes),
                                      nesterov=(0.7, 0.9) if "outer" in federation else ()))
    for group in range(run.groups):
        assert_close(run.losses(group), expected.losses[group], 1e-6, f"group {group}: loss of step")
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 1e-6, "evaluation loss")
    # One exchange is under way at the run's end; it is finished, not dropped.
    fragments = federation.get("fragments", 1)
    begins = [step for step in range(1, STEPS + 1) for f in range(fragments)
              if step % federation["every"] == -(-(f + 1) * federation["every"] // fragments) % federation["every"]]
    rounds = run.of("round")
    assert [r["step"] for r in rounds] == begins
    assert [r["fragment"] for r in rounds] == [i % fragments for i in range(len(begins))]
    assert all(0 < r["exposed_seconds"] <= r["seconds"] for r in rounds)
    assert ("drops what groups train" in run.stderr) == (federation.get("delay", 0) > 0 and "mix" not in federation)


def test_sends_the_bytes_of_rounds_without_it(program):
    """Also step by step: what a round's traffic record says of training is what had been sent when it began."""
    parallelism = {"groups": 2, "data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2}
    plain = program.train(4, parallelism=parallelism, federation={"every": 5})
    late = program.train(4, parallelism=parallelism, federation={"every": 5, "delay": 2, "mix": 0.5})
    turns = program.train(4, parallelism=parallelism, federation={"every": 5, "fragments": 2, "delay": 1})
    purposes = ("gather", "reduce", "replica", "aggregate")
    for run in (late, turns):
        assert all(run.traffic()[purpose] == plain.traffic()[purpose] for purpose in purposes)
    assert len(plain.of("traffic")) == len(late.of("traffic")) == 5  # four rounds and the end
    for before, after in zip(plain.of("traffic")[:-1], late.of("traffic")[:-1]):
        assert all(before[purpose] == after[purpose] for purpose in purposes)
        assert before["inter_group"] >= before["aggregate"] / 2 > 0


def test_keys_at_their_defaults_change_nothing(program):
    plain = program.train(2, parallelism={"groups": 2}, federation={"every": 4})
    spelled = program.train(2, parallelism={"groups": 2}, federation={"every": 4, "delay": 0, "fragments": 1})
    assert plain.numbers_as_text() == spelled.numbers_as_text()


def test_one_group_has_no_rounds_to_delay(program):
    plain = program.train(2)
    delayed = program.train(2, federation={"every": 4, "delay": 2, "mix": 0.5, "fragments": 2, "compress": "int8"})
    assert plain.numbers_as_text() == delayed.numbers_as_text()


@pytest.mark.parametrize("federation", [
    {"delay": 2, "mix": 0.5, "compress": "int8", "outer": "nesterov"},
    {"fragments": 3, "compress": "topk", "measures": True},
    {"delay": 1, "fragments": 2, "weights": [0, 1], "outer_max_norm": 0.5}])
def test_runs_are_repeatable_to_the_bit(federation, program):
    """Whatever the threads beside training do, and with everything else that rounds have."""
    def train():
        return program.train(4, training={"master_dtype": "bf16"}, parallelism={"groups": [1, 3]},
                             federation={"every": 6, **federation})
    first, second = train(), train()
    assert first.numbers_as_text() == second.numbers_as_text()
    assert all(len(r["change_norm"]) == len(r["cosine"]) == 2 for r in first.of("round"))
    assert all(abs(c) <= 1 + 1e-9 for r in first.of("round") for c in r["cosine"])


@pytest.mark.parametrize("federation, says", [
    ({"every": 4, "delay": 5}, "delay is 5, but must be from 0 to the 4 steps"),
    ({"every": 4, "fragments": 5}, "fragments is 5, but must be from 1 to the 4 steps"),
    ({"every": 99, "fragments": 5}, "the model has just 4 units to exchange"),
    ({"every": 4, "mix": 0.5}, "mix"), ({"every": 4, "delay": 1, "mix": 1.0}, "mix"),
    ({"every": 4, "delay": 1, "inner_state": "reset"}, "needs rounds of the whole model at once")])
def test_what_cannot_be_is_refused(federation, says, program):
    path, _ = program.config(parallelism={"groups": 2}, federation=federation)
    done = subprocess.run([BINARY, "train", path, "--ranks", "2", "--dry-run"], capture_output=True, text=True,
                          env=program.environment())
    assert done.returncode == 2 and says in done.stderr, done.stderr


# --- over a slow link

# One rank here and one in a network of its own, behind a link of that rate; "$@" is what each rank runs.
SLOW_LINK = """
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip netns add far
ip link add near type veth peer name far netns far
ip addr add 10.77.0.1/24 dev near
ip link set near up
ip -n far addr add 10.77.0.2/24 dev far
ip -n far link set far up
ip -n far link set lo up
tc qdisc add dev near root tbf rate {rate} burst 32kb latency 400ms
tc -n far qdisc add dev far root tbf rate {rate} burst 32kb latency 400ms
RANK=0 "$@" &
RANK=1 ip netns exec far "$@"
wait $!
"""


def why_no_slow_link():
    missing = [tool for tool in ("unshare", "ip", "tc", "mount") if not shutil.which(tool, path=TOOLS)]
    if missing:
        return f"there is no {', '.join(missing)}"
    script = SLOW_LINK.format(rate="8mbit")
    tried = subprocess.run(["unshare", "-rmn", "sh", "-c", script, "sh", "true"], capture_output=True, text=True,
                           env={**os.environ, "PATH": TOOLS})
    return f"this machine forbids namespaces or limits of links: {tried.stderr.strip()}" if tried.returncode else None


TOOLS = os.environ["PATH"] + ":/usr/sbin:/sbin"


def test_a_delay_hides_the_exchange(program):
    """The link lets about 1 MB through in a second; the model has 2 MB, so a round's exchange takes seconds, and the
    steps of the delay take longer. Not the times are asserted, but which part of the exchange training waits for."""
    reason = why_no_slow_link()
    if reason:
        pytest.skip(reason)

    def train(rate, **federation):
        path, folder = program.config(model={"hf": None, "preset": "llama-tiny"}, data={"eval": None},
                                      training={"local_batch_size": 128, "steps": 33}, parallelism={"groups": 2},
                                      federation={"every": 16, **federation})
        environment = program.environment(WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_ADDR="10.77.0.1",
                                          MASTER_PORT=29511, PATH=TOOLS)
        done = subprocess.run(["unshare", "-rmn", "sh", "-c", SLOW_LINK.format(rate=rate), "sh", BINARY, "train", path],
                              capture_output=True, text=True, env=environment, timeout=150)
        return Program.result(done, folder)

    plain = train("30mbit")
    assert all(r["exposed_seconds"] == r["seconds"] for r in plain.of("round"))
    late = train("30mbit", delay=16, mix=0.5)
    first, second = late.of("round")
    assert first["seconds"] > 0.3  # the link was slow indeed
    assert first["exposed_seconds"] < 0.2 * first["seconds"], first
    assert second["exposed_seconds"] > 0.2 * second["seconds"]  # begun one step before the end, so there was no time
