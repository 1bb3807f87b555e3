"""Rounds in which groups make unlike numbers of steps: `federation.every` as a list, in tokens, or in time."""

import itertools
import re
import subprocess

import pytest

import reference
from multi_harness import BINARY, SEQ_LEN, STEPS, assert_close, with_nan
from test_dry_run import dry_run
from test_federation import between, recipe
from test_virtual_groups import train_virtually, what_was_trained

HSDP = {"data_parallel_shard_degree": [2, 1], "data_parallel_replicate_degree": -1}
# ranks, [parallelism], [federation], steps of a round by group; every rank brings 3 sequences a step
LISTS = {
    "one rank and three shards": (4, {"groups": [1, 3]}, {}, [4, 1]),
    "the larger group makes more": (4, {"groups": [1, 3]}, {"weights": "uniform"}, [2, 5]),
    "pairs of shards and replicas": (4, {"groups": 2, **HSDP}, {"outer": "nesterov"}, [1, 2]),
    "three groups": (3, {"groups": 3}, {"prox_mu": 0.1}, [5, 3, 5]),
}


def steps_of(run, group):
    """The field `step` of a group's records, in order."""
    return [r["step"] for r in run.of("step", group=group)]


def column(run, group, field):
    return [r[field] for r in run.of("step", group=group)]


def expected_steps(every, group, steps=STEPS):
    return [base + own for base in range(0, steps, max(every)) for own in range(1, every[group] + 1)]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_equals_the_reference(name, program, corpus, weights):
    ranks, parallelism, federation, every = LISTS[name]
    run = program.train(ranks, parallelism=parallelism, federation={"every": every, **federation})
    sizes = run.start["groups"]
    counts = [1] * len(sizes) if "weights" in federation else [size * k for size, k in zip(sizes, every)]
    averaging = [count / sum(counts) for count in counts]
    expected = reference.train(recipe(corpus, weights, batch=3 * ranks, groups=len(sizes), every=every, max_norm=1.0,
                                      shares=tuple(3 * size for size in sizes), averaging=tuple(averaging),
                                      prox_mu=federation.get("prox_mu", 0.0),
                                      nesterov=(0.7, 0.9) if "outer" in federation else ()))
    rounds = run.of("round")
    assert [r["step"] for r in rounds] == list(range(max(every), STEPS + 1, max(every)))
    assert all(r["steps"] == every and r["weights"] == pytest.approx(averaging, rel=1e-15) for r in rounds)
    for group in range(run.groups):
        assert steps_of(run, group) == expected_steps(every, group)
        assert_close(column(run, group, "loss"), expected.losses[group], 1e-6, f"group {group}: loss of step")
        assert_close(column(run, group, "grad_norm"), expected.norms[group], 1e-5, f"group {group}: norm of step")
    fastest = every.index(max(every))
    assert [column(run, g, "lr") for g in range(run.groups)] == [
        [column(run, fastest, "lr")[step - 1] for step in steps_of(run, g)] for g in range(run.groups)]
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 1e-6, "evaluation loss")
    assert run.records[-1]["steps"] == STEPS and run.records[-1]["skipped"] == 0


def test_rounds_by_tokens_are_those_of_the_list_that_they_come_to(program):
    """A group of three ranks has them in a third of the steps. One token more is a step more of each group."""
    by_list = program.train(4, parallelism={"groups": [1, 3]}, federation={"every": [6, 2]},
                            training={"steps": 18})
    tokens_of_a_step = 3 * SEQ_LEN
    for tokens in (6 * tokens_of_a_step, 5 * tokens_of_a_step + 1):
        by_tokens = program.train(4, parallelism={"groups": [1, 3]}, federation={"every": f"{tokens} tokens"},
                                  training={"steps": 18})
        assert by_tokens.numbers_as_text() == by_list.numbers_as_text()
        assert [r["steps"] for r in by_tokens.of("round")] == [[6, 2]] * 3
        assert by_tokens.traffic() | {"time_s": 0} == by_list.traffic() | {"time_s": 0}
    more = program.train(4, parallelism={"groups": [1, 3]}, training={"steps": 18},
                         federation={"every": f"{6 * tokens_of_a_step + 1} tokens"})
    # The last round ends where the group with most steps has reached the run's.
    assert [(r["step"], r["steps"]) for r in more.of("round")] == [(7, [7, 3]), (14, [7, 3]), (18, [4, 3])]


def test_a_list_of_equal_numbers_is_that_number(program):
    plain, listed = (program.train(3, parallelism={"groups": [1, 2]}, training={"steps": 10},
                                   federation={"every": every, "delay": 1, "mix": 0.5}) for every in (4, [4, 4]))
    assert plain.numbers_as_text() == listed.numbers_as_text()
    assert [r["steps"] for r in listed.of("round")] == [[4, 4]] * 2


def test_fragments_record_the_steps_since_their_own_last_round(program):
    run = program.train(2, parallelism={"groups": 2}, training={"steps": 8}, federation={"every": 4, "fragments": 2})
    assert [(r["fragment"], r["step"], r["steps"]) for r in run.of("round")] == [
        (0, 2, [2, 2]), (1, 4, [4, 4]), (0, 6, [4, 4]), (1, 8, [4, 4])]


def test_after_a_warm_up_with_validation_and_few_records(program):
    """Rounds end at steps 6, 10, 14, 18: evaluations follow the first at or past each multiple of 3, and one ends the
    run. A record comes every second step that a group has made, and at the last one."""
    tables = {"parallelism": {"groups": [1, 3]}, "training": {"steps": 18}, "validation": {"interval": 3},
              "federation": {"every": [4, 1], "start_step": 2, "outer": "nesterov", "inner_state": "reset"}}
    run = program.train(4, metrics={"interval": 2}, **tables)
    assert [(r["round"], r["step"]) for r in run.of("round")] == [(1, 6), (2, 10), (3, 14), (4, 18)]
    assert [e["step"] for e in run.of("eval")] == [6, 10, 14, 18]
    assert steps_of(run, 0) == list(range(2, 19, 2))
    assert steps_of(run, 1) == [2, 7, 15]  # of its 6: two of the warm-up, and one a round
    assert run.traffic()["state"] == 0  # after a round there is one model
    assert run.numbers_as_text()[1:] == program.train(4, **tables).numbers_as_text()[1:]


def test_a_round_sends_what_it_does_otherwise(program):
    """And steps what each group's steps send: five rounds of 4 and 1 are as many bytes as steps and rounds apart."""
    uneven = program.train(4, parallelism={"groups": [1, 3]}, federation={"every": [4, 1]})
    assert uneven.traffic()["aggregate"] == 5 * between(2, [])
    single = program.train(4, parallelism={"groups": [1, 3]}, federation={"every": 1}, training={"steps": 5})
    for purpose in ("gather", "reduce", "replica", "aggregate"):  # the one rank sends none of the first three
        assert uneven.traffic()[purpose] == single.traffic()[purpose]


def test_a_dry_run_does_not_guess_how_many_rounds_there_are(program):
    path, _ = program.config()
    for every, said in (("30s", "30s"), ("1M tokens", "1000000 tokens")):
        done = dry_run(program, path, 4, "parallelism.groups=[1,3]", f"federation.every={every}")
        assert done.returncode == 0 and "# the end of a round " in done.stdout and "# 20 steps" not in done.stdout
        assert f"# Rounds of {said}: how many there are, " in done.stdout


# groups, ranks of a group, tables
VIRTUAL = {
    "a list": (3, 1, {"federation": {"every": [4, 1, 2]}}),
    "a list, two ranks a group, after a warm-up": (
        2, 2, {"federation": {"every": [1, 3], "start_step": 2, "outer": "nesterov", "compress": "int8", "block": 64},
               "training": {"steps": 11}, "validation": {"interval": 2}}),
    "tokens": (2, 2, {"federation": {"every": "300 tokens"}}),
}


@pytest.mark.parametrize("name", VIRTUAL)
def test_virtual_groups_equal_real_ones(name, program):
    groups, ranks, tables = VIRTUAL[name]
    tables = {**tables, "training": {"local_batch_size": 2, "steps": 12, **tables.get("training", {})}}
    real = program.train(groups * ranks, parallelism={"groups": groups}, **tables)
    virtual = train_virtually(program, groups, ranks, **tables)
    assert len(virtual.of("round")) >= 3
    assert virtual.numbers_as_text() == real.numbers_as_text()
    assert what_was_trained(virtual) == what_was_trained(real)


def test_a_group_that_skips_makes_more_steps_for_its_tokens(program, tmp_path, weights):
    """A NaN in the row of a byte that few sequences hold, in a part that rounds leave alone, so that groups skip at
    steps of their own; virtual ones alike."""
    tables = {"model": {"hf": with_nan(tmp_path / "nan", weights)}, "data": {"eval": None},
              "training": {"local_batch_size": 1, "seq_len": 8, "steps": 40, "nonfinite": "skip"},
              "federation": {"every": "32 tokens", "exclude": "model.embed_tokens.weight"}}
    real = program.train(4, parallelism={"groups": 2}, **tables)
    virtual = train_virtually(program, 2, 2, **tables)
    assert what_was_trained(virtual) == what_was_trained(real)
    steps = [r["steps"] for r in real.of("round")]
    assert any(a != b for a, b in steps) and sum(max(pair) for pair in steps) == 40
    for group in range(2):
        skipped = sum(loss is None for loss in column(real, group, "grad_norm"))
        assert len(steps_of(real, group)) == sum(pair[group] for pair in steps) and skipped > 0


def test_by_time_a_slow_group_holds_up_no_fast_one(program):
    """Three shards need dozens of messages a step, one rank needs none. Nothing here depends on how long anything
    takes, but that over all rounds the one rank makes more steps."""
    run = program.train(4, parallelism={"groups": [1, 3]}, training={"steps": 200}, validation={"interval": 50},
                        federation={"every": "0.4s", "weights": "uniform", "start_step": 2})
    rounds = run.of("round")
    for r in rounds:
        assert min(r["steps"]) >= 1 and re.fullmatch("[0-9a-f]{16}", r["digest"])
    ends = list(itertools.accumulate((max(r["steps"]) for r in rounds), initial=2))
    assert [r["step"] for r in rounds] == ends[1:] and ends[-1] == 200
    own = [sum(steps) + 2 for steps in zip(*(r["steps"] for r in rounds))]
    assert own[0] > own[1]
    for group in range(2):
        assert len(steps_of(run, group)) == own[group]
        assert run.of("step", group=group)[-1]["tokens"] == own[group] * (1, 3)[group] * 3 * SEQ_LEN
    assert {e["step"] for e in run.of("eval")} <= set(ends)
    assert run.final_eval()["step"] == run.records[-1]["steps"] == 200
    assert run.traffic()["aggregate"] == (len(rounds) + 3) * between(2, [])  # two steps of the warm-up and its end


def test_by_time_a_round_has_a_step(program):
    """Whatever the time: much too short a one is K = 1, for all groups."""
    short = program.train(3, parallelism={"groups": [1, 2]}, training={"steps": 6}, federation={"every": "0.000001s"})
    one = program.train(3, parallelism={"groups": [1, 2]}, training={"steps": 6}, federation={"every": 1})
    assert short.numbers_as_text() == one.numbers_as_text()


def test_with_one_group_there_are_no_rounds(program):
    plain = program.train(2, training={"steps": 5}, validation={"interval": 2})
    for every in ([3], "90 tokens", "0.01s"):
        run = program.train(2, training={"steps": 5}, validation={"interval": 2}, federation={"every": every})
        assert run.of("round") == [] and run.numbers_as_text() == plain.numbers_as_text()


@pytest.mark.parametrize("every, limit", [([3, 1], 1e-3), ("600 tokens", 1e-3), ("1h", 1.0)])
def test_the_time_limit_ends_the_run_with_a_round(every, limit, program):
    """That of an hour ends there: the time limit is over on all ranks at about the same time."""
    path, folder = program.config(parallelism={"groups": [1, 3]}, training={"steps": 30000, "time_limit_s": limit},
                                  federation={"every": every}, metrics={"interval": 1000})
    done = subprocess.run([BINARY, "train", path, "--ranks", "4"], env=program.environment(), capture_output=True,
                          text=True, timeout=150)
    assert done.returncode == 5, done.stderr
    text = (folder / "metrics.jsonl").read_text()
    assert text.count('"kind":"round"') == 1 and text.splitlines()[-1].count('"kind":"end"') == 1


def test_virtual_groups_by_time_are_refused(program):
    path, _ = program.config(federation={"every": "30s"})
    done = subprocess.run([BINARY, "train", path, "--ranks", "1", "--virtual-groups", "2"], env=program.environment(),
                          capture_output=True, text=True)
    assert done.returncode == 2 and "--virtual-groups trains groups in turn" in done.stderr, done.stderr
