"""The synchronous warm-up (`federation.start_step`): all groups are trained as one, then rounds begin."""

import pytest

import reference
from multi_harness import BATCH, BINARY, STEPS, Run, assert_close, run_process, with_nan

HSDP = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": -1}
# name: ranks, [parallelism]
LAYOUTS = {
    "two groups of two shards": (4, {"groups": 2}),
    "one rank and three shards": (4, {"groups": [1, 3]}),
    "two groups of 2 x 2": (8, {"groups": 2, **HSDP}),
    "four, two and two ranks in pairs of shards": (8, {"groups": [4, 2, 2], **HSDP}),
}


def world_losses(run):
    """The token mean over all groups, each of whose ranks brings as many tokens."""
    sizes = run.start["groups"]
    return [sum(size * loss for size, loss in zip(sizes, losses)) / sum(sizes)
            for losses in zip(*(run.losses(g) for g in range(run.groups)))]


def batch_of(ranks):
    return {"local_batch_size": 2 if ranks == 8 else BATCH // ranks}


@pytest.mark.parametrize("optimizer", [{}, {"name": "sgd", "lr": 0.05, "momentum": 0.9}], ids=["adamw", "sgd"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_that_is_all_warm_up_equals_one_group(name, optimizer, program):
    ranks, parallelism = LAYOUTS[name]
    run = program.train(ranks, training=batch_of(ranks), parallelism=parallelism, optimizer=optimizer,
                        federation={"every": 1, "start_step": STEPS})
    one = program.train(ranks, training=batch_of(ranks), optimizer=optimizer)
    assert run.of("round") == [] and run.groups > 1
    assert_close(world_losses(run), one.losses(), 1e-6, "mean loss of step")
    assert_close([run.final_eval()["loss"]], [one.final_eval()["loss"]], 1e-6, "evaluation loss")
    for group in range(run.groups):
        assert run.norms(group) == run.norms(0)
        assert_close(run.norms(group), one.norms(), 1e-6, f"group {group}: gradient norm of step")
        assert run.losses(group) != one.losses()


# [parallelism], sequences of a step by group, [federation], the same for the reference
THEN_ROUNDS = {
    "two groups": ({"groups": 2}, (6, 6), {}, {}),
    "unequal groups": ({"groups": [1, 3]}, (3, 9), {}, {}),
    "an outer optimizer and FedProx": ({"groups": [1, 3]}, (3, 9),
                                       {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9, "prox_mu": 2.0},
                                       {"nesterov": (0.7, 0.9), "prox_mu": 2.0}),
}


@pytest.mark.parametrize("name", THEN_ROUNDS)
def test_rounds_are_counted_from_the_end_of_the_warm_up(name, program, corpus, weights):
    parallelism, shares, federation, keys = THEN_ROUNDS[name]
    run = program.train(4, training={"local_batch_size": 3}, parallelism=parallelism,
                        federation={"every": 4, "start_step": 6, **federation})
    assert [(r["round"], r["step"]) for r in run.of("round")] == [(1, 10), (2, 14), (3, 18)]
    expected = reference.train(reference.Recipe(
        weights=weights, train=corpus.train, eval=corpus.eval, seed=3, steps=STEPS, batch=BATCH, groups=2, every=4,
        start_step=6, max_norm=1.0, shares=shares, averaging=tuple(share / BATCH for share in shares), warmup_steps=5,
        min_lr_factor=0.1, **keys))
    for group in range(2):
        assert_close(run.losses(group), expected.losses[group], 2e-6, f"group {group}: loss of step")
        assert_close(run.norms(group), expected.norms[group], 1e-5, f"group {group}: gradient norm of step")
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 2e-6, "evaluation loss")


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_groups_leave_the_warm_up_with_the_same_bits(name, program):
    """A step with learning rate 0 follows it, and a round: groups bring what the warm-up left them. The digest of the
    round is that of one group's model where only that group counts, so equal digests are equal models."""
    ranks, parallelism = LAYOUTS[name]
    digests, warm_up = set(), 6
    groups = parallelism["groups"] if isinstance(parallelism["groups"], int) else len(parallelism["groups"])
    for counts in range(groups):
        weights = [1 if group == counts else 0 for group in range(groups)]
        run = program.train(ranks, training={**batch_of(ranks), "steps": warm_up + 1}, parallelism=parallelism,
                            lr_scheduler={"warmup_steps": 0, "decay": "linear", "decay_steps": warm_up,
                                          "min_lr_factor": 0.0},
                            federation={"every": 1, "start_step": warm_up, "weights": weights})
        (last,) = run.of("round")
        assert last["step"] == warm_up + 1 and last["drift"] == [0.0] * groups
        assert [s["lr"] for s in run.of("step", group=0)][-2:] != [0.0, 0.0] and run.of("step")[-1]["lr"] == 0.0
        digests.add(last["digest"])
    assert len(digests) == 1


def test_evaluation_in_the_warm_up_needs_no_mean(program):
    run = program.train(4, training={"local_batch_size": 3, "steps": 6}, parallelism={"groups": 2},
                        federation={"start_step": 6}, validation={"interval": 2}, lr_scheduler={"warmup_steps": 0})
    one = program.train(4, training={"local_batch_size": 3, "steps": 6}, validation={"interval": 2},
                        lr_scheduler={"warmup_steps": 0})
    assert run.traffic()["state"] == 0
    losses, expected = ([e["loss"] for e in r.of("eval")] for r in (run, one))
    assert_close(losses, expected, 1e-6, "evaluation loss")


def test_a_step_that_is_not_finite_is_skipped_by_all_groups(program, tmp_path, weights):
    """Only the rank whose sequences hold a spoilt token sees it, the others skip with it. So their models stay one.
    The NaN lies in a row of the embedding that most sequences don't read."""
    run = program.train(4, model={"hf": with_nan(tmp_path / "nan", weights)}, data={"eval": None},
                        parallelism={"groups": [1, 3]}, federation={"start_step": 30},
                        training={"local_batch_size": 1, "seq_len": 8, "steps": 30, "nonfinite": "skip"})
    norms = [[s["grad_norm"] for s in run.of("step", group=group)] for group in range(2)]
    assert norms[0] == norms[1] and 0 < norms[0].count(None) < 30
    alone = [s for s in run.of("step", group=0) if s["grad_norm"] is None and s["loss"] is not None]
    assert alone, "no step was spoilt in the other group only"
    assert run.records[-1]["skipped"] == 2 * norms[0].count(None)


def test_the_time_limit_ends_the_warm_up_for_all(program):
    path, run_folder = program.config(training={"local_batch_size": 3, "steps": STEPS, "time_limit_s": 0.001},
                                      parallelism={"groups": [1, 3]}, federation={"start_step": STEPS})
    done = run_process([BINARY, "train", path, "--ranks", 4], program.environment())
    assert done.returncode == 5, done.stderr
    run = Run(run_folder)
    assert [(s["group"], s["step"]) for s in sorted(run.of("step"), key=lambda s: s["group"])] == [(0, 1), (1, 1)]
    assert run.records[-1]["kind"] == "end" and len(run.of("eval")) == 1
