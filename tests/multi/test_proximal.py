"""FedProx's term (`federation.prox_mu`) against the reference, which adds it to torch's gradients before torch clips."""

import pytest

import reference
from multi_harness import BATCH, STEPS, assert_close

MU = 2.0
ADAMW = {"name": "adamw", "lr": 0.003, "weight_decay": 0.1}
# name: [optimizer], [parallelism], sequences of a step by group
RUNS = {
    "adamw, two groups of two": (ADAMW, {"groups": 2}, (6, 6)),
    "adamw, one rank and three": (ADAMW, {"groups": [1, 3]}, (3, 9)),
    "sgd, two groups of two": ({"name": "sgd", "lr": 0.05, "weight_decay": 0.01, "momentum": 0.9}, {"groups": 2}, (6, 6)),
    "sgd, one rank and three": ({"name": "sgd", "lr": 0.05, "weight_decay": 0.0}, {"groups": [1, 3]}, (3, 9)),
}


def federated(program, optimizer, parallelism, **federation):
    return program.train(4, training={"local_batch_size": 3}, optimizer=optimizer, parallelism=parallelism,
                         federation={"every": 4, **federation})


@pytest.mark.parametrize("name", RUNS)
def test_fedprox_equals_the_reference(name, program, corpus, weights):
    """With clipping on, and a term that matters: without it losses are far from these."""
    optimizer, parallelism, shares = RUNS[name]
    run = federated(program, optimizer, parallelism, prox_mu=MU)
    keys = {"weights": weights, "train": corpus.train, "eval": corpus.eval, "seed": 3, "steps": STEPS, "batch": BATCH,
            "groups": 2, "every": 4, "max_norm": 1.0, "shares": shares, "warmup_steps": 5, "min_lr_factor": 0.1,
            "averaging": tuple(share / BATCH for share in shares), "optimizer": optimizer["name"],
            **{key: optimizer[key] for key in ("lr", "weight_decay", "momentum") if key in optimizer}}
    expected = reference.train(reference.Recipe(**keys, prox_mu=MU))
    for group in range(2):
        assert_close(run.losses(group), expected.losses[group], 1e-6, f"group {group}: loss of step")
        assert_close(run.norms(group), expected.norms[group], 1e-5, f"group {group}: gradient norm of step")
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 1e-6, "evaluation loss")
    plain = reference.train(reference.Recipe(**keys))
    assert abs(plain.eval_loss / expected.eval_loss - 1) > 1e-4
    assert any(abs(a / b - 1) > 0.01 for a, b in zip(plain.norms[0], expected.norms[0]))


def test_mu_0_is_no_term_to_the_bit(program):
    without = federated(program, ADAMW, {"groups": [1, 3]})
    assert federated(program, ADAMW, {"groups": [1, 3]}, prox_mu=0).numbers_as_text() == without.numbers_as_text()
    assert federated(program, ADAMW, {"groups": [1, 3]}, prox_mu=0.1).numbers_as_text() != without.numbers_as_text()


def test_the_first_step_from_an_anchor_has_no_term(program):
    """So rounds of one step have none at all, however large mu is."""
    with_term, without = (program.train(4, parallelism={"groups": 2}, federation={"every": 1, "prox_mu": mu})
                          for mu in (1000, 0))
    for group in range(2):
        assert_close(with_term.norms(group), without.norms(group), 1e-6, f"group {group}: gradient norm of step")
    assert_close([with_term.final_eval()["loss"]], [without.final_eval()["loss"]], 1e-6, "evaluation loss")


def test_one_group_has_no_anchor(program):
    plain, keyed = (program.train(2, training={"steps": 6}, federation=keys) for keys in ({}, {"prox_mu": 5.0}))
    assert keyed.numbers_as_text() == plain.numbers_as_text()
    assert keyed.start["memory"] == plain.start["memory"] and keyed.start["memory"]["prox_anchor"] == 0


@pytest.mark.parametrize("training, optimizer", [
    ({"local_batch_size": 1, "gradient_accumulation_steps": 3}, {}),
    ({"local_batch_size": 1, "gradient_accumulation_steps": 3, "reduce_each_micro_step": False}, {}),
    ({}, {"fused_backward": True})], ids=["micro-steps", "reduced at the last micro-step", "updates in the backward"])
def test_the_term_is_added_once_a_step(training, optimizer, program):
    """However the step's gradient came about. Over replicas and shards, since each adds the term to its own part."""
    base = {"training": {"local_batch_size": 3, "max_norm": 0.0}, "federation": {"every": 4, "prox_mu": MU},
            "parallelism": {"groups": 2, "data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}}
    run = program.train(8, **{**base, "training": {**base["training"], **training}}, optimizer=optimizer)
    plain = program.train(8, **base)
    for group in range(2):
        assert_close(run.losses(group), plain.losses(group), 1e-6, f"group {group}: loss of step")
        assert_close(run.norms(group), plain.norms(group), 1e-5, f"group {group}: gradient norm of step")


@pytest.mark.parametrize("optimizer", [{"name": "muon", "lr": 1e-3}, {}], ids=["muon", "adamw"])
def test_bf16_masters_and_muon_follow_it(optimizer, program):
    """A term that dwarfs the gradient holds a group at its anchor: it then drifts less than without."""
    drifts = []
    for mu in (0, 100):
        run = program.train(2, parallelism={"groups": 2}, federation={"every": 10, "prox_mu": mu}, optimizer=optimizer,
                            training={"local_batch_size": 6, "master_dtype": "bf16", "max_norm": 0.0})
        drifts.append([r["drift"][0] for r in run.of("round")])
        assert run.start["memory"]["prox_anchor"] == (run.start["memory"]["parameters"] if mu else 0)
    assert all(held < free for free, held in zip(*drifts))
