"""bf16 computation with fp32 master weights stays near fp32, and micro-steps change nothing but rounding.

Tolerances in bf16: its unit roundoff is 2^-9 (0.2 %), and a loss is a mean over hundreds of logits whose roundings
partly cancel, so a step's loss may be off by that one rounding (measured: 0.05 %). The norm's gradients have passed
several layers' roundings: four are allowed (measured: 0.45 %).
"""

import pytest

from multi_harness import BATCH, BINARY, STEPS, assert_close, run_process

ROUNDOFF = 2**-9
HSDP = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}


@pytest.fixture(scope="module")
def one_rank(module_program):
    return module_program.train(1, training={"local_batch_size": BATCH})


@pytest.mark.parametrize("ranks, reduce_dtype, parallelism", [(1, "fp32", {}), (3, "fp32", {}),
                                                              (4, "bf16", HSDP)])
def test_bf16_stays_near_fp32(ranks, reduce_dtype, parallelism, program, one_rank):
    run = program.train(ranks, parallelism=parallelism, training={
        "local_batch_size": BATCH // ranks, "dtype": "bf16", "reduce_dtype": reduce_dtype})
    assert_close(run.losses(), one_rank.losses(), ROUNDOFF, "loss of step")
    assert_close(run.norms(), one_rank.norms(), 4 * ROUNDOFF, "gradient norm of step")
    assert_close([run.final_eval()["loss"]], [one_rank.final_eval()["loss"]], ROUNDOFF, "evaluation loss")
    # It was bf16: rounding shows from the first step on.
    assert abs(run.losses()[0] / one_rank.losses()[0] - 1) > 1e-6


def test_small_updates_are_not_lost_in_bf16(program):
    """Steps of 1e-5 on weights around 0.1 vanish in bf16 numbers, which are 5e-4 apart there. Masters in fp32 keep
    them: the evaluation loss falls as in fp32 (measured: 1.5 % apart; without masters it would hardly fall)."""
    falls = []
    for dtype in ("fp32", "bf16"):
        run = program.train(2, training={"local_batch_size": BATCH // 2, "dtype": dtype}, optimizer={"lr": 1e-5},
                            validation={"interval": 1},
                            lr_scheduler={"warmup_steps": 0, "decay": "none", "min_lr_factor": None})
        evals = [r["loss"] for r in run.of("eval")]
        assert len(evals) == STEPS
        falls.append(evals[0] - evals[-1])
    assert falls[0] > 0.02
    assert abs(falls[1] / falls[0] - 1) < 0.1


SMALL_STEPS = {"optimizer": {"lr": 1e-5}, "validation": {"interval": 1},
               "lr_scheduler": {"warmup_steps": 0, "decay": "none", "min_lr_factor": None}}


def test_bf16_masters_lose_small_updates_and_say_so(program):
    """The same steps of 1e-5 with masters in bf16: most are lost, and the run has said so before its first step."""
    path, _ = program.config(training={"local_batch_size": BATCH // 2, "dtype": "bf16", "master_dtype": "bf16"},
                             **SMALL_STEPS)
    done = run_process([BINARY, "train", path, "--ranks", 2], program.environment())
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1 and 'master_dtype = "bf16" loses every update' in warnings[0], done.stderr
    kept, lost = (program.train(2, training={"local_batch_size": BATCH // 2, "dtype": "bf16", "master_dtype": master},
                                **SMALL_STEPS) for master in ("fp32", "bf16"))
    falls = [evals[0]["loss"] - evals[-1]["loss"] for evals in (kept.of("eval"), lost.of("eval"))]
    assert falls[1] < 0.5 * falls[0], falls


@pytest.mark.parametrize("groups", [1, 2])
def test_bf16_masters_train_near_fp32_ones(groups, program):
    """At an ordinary learning rate they follow, in each layout alike, and groups that average them stay equal."""
    runs = [program.train(4, parallelism={"groups": groups, "data_parallel_shard_degree": 2,
                                          "data_parallel_replicate_degree": 2 // groups},
                          federation={"every": 3}, training={"local_batch_size": BATCH // 4, "master_dtype": master})
            for master in ("fp32", "bf16")]
    assert_close(runs[1].losses(), runs[0].losses(), 4 * ROUNDOFF, "loss of step")
    assert runs[1].losses() != runs[0].losses()


@pytest.mark.parametrize("ranks, micro_steps, parallelism", [(1, 3, {}), (1, 12, {}), (2, 3, {}), (4, 3, HSDP)])
def test_micro_steps_equal_one_batch(ranks, micro_steps, parallelism, program, one_rank):
    """3 micro-steps of 4 sequences, or 12 of 1, are one step of 12: the mean is over all tokens of the step."""
    run = program.train(ranks, parallelism=parallelism, training={
        "local_batch_size": BATCH // (ranks * micro_steps), "gradient_accumulation_steps": micro_steps})
    assert_close(run.losses(), one_rank.losses(), 1e-5, "loss of step")
    assert_close(run.norms(), one_rank.norms(), 1e-5, "gradient norm of step")
    assert_close([run.final_eval()["loss"]], [one_rank.final_eval()["loss"]], 1e-5, "evaluation loss")
    assert run.column("tokens") == one_rank.column("tokens")
