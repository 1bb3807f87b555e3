"""A random sample of the engine's option matrix over real processes. The whole of it runs over threads in
tests/unit/shard/matrix_test.cpp; here another part is drawn in each run, and the seed printed with it.

To repeat one: FEDSHARD_MATRIX_SEED=n pytest tests/multi/test_matrix.py
"""

import itertools
import os
import random

import pytest

import reference
from multi_harness import BATCH, assert_close

SEED = int(os.environ.get("FEDSHARD_MATRIX_SEED", random.SystemRandom().randrange(1_000_000)))
STEPS = 5
SAMPLE = 8

LAYOUTS = {"1": (1, 1), "2": (1, 2), "3": (1, 3), "4": (1, 4), "2x2": (2, 2), "1x4": (4, 1)}  # name: (R, F)
AXES = {
    "layout": list(LAYOUTS),
    "accumulation": [1, 3],
    "reduce_each": [True, False],
    "reshard": [True, False],
    "checkpoint": ["none", "selective", "full"],
    "prefetch": [0, 1, 2],
    "clip": [1.0, 0.0],
    "tied": [False, True],
}
CASES = [dict(zip(AXES, values)) for values in itertools.product(*AXES.values())]
CASES = [c for c in CASES if BATCH % (c["accumulation"] * LAYOUTS[c["layout"]][0] * LAYOUTS[c["layout"]][1]) == 0]


@pytest.fixture(scope="module")
def expected(corpus, weights, tied_weights):
    """By (tied, clip), made when first asked for: PyTorch's losses and norms in one process."""
    made = {}

    def of(tied, clip):
        if (tied, clip) not in made:
            made[tied, clip] = reference.train(reference.Recipe(
                weights=tied_weights if tied else weights, train=corpus.train, eval=corpus.eval, seed=3, steps=STEPS,
                batch=BATCH, max_norm=clip, warmup_steps=2, min_lr_factor=0.1))
        return made[tied, clip]

    return of


@pytest.mark.parametrize("case", random.Random(SEED).sample(CASES, SAMPLE),
                         ids=lambda case: f"seed{SEED}-" + "-".join(str(v) for v in case.values()))
def test_equals_pytorch(case, program, weights, tied_weights, expected):
    replicas, shards = LAYOUTS[case["layout"]]
    run = program.train(
        replicas * shards, model={"hf": tied_weights if case["tied"] else weights},
        training={"steps": STEPS, "max_norm": case["clip"], "gradient_accumulation_steps": case["accumulation"],
                  "local_batch_size": BATCH // (replicas * shards * case["accumulation"]),
                  "reduce_each_micro_step": case["reduce_each"], "activation_checkpoint": case["checkpoint"]},
        lr_scheduler={"warmup_steps": 2},
        parallelism={"data_parallel_shard_degree": shards, "data_parallel_replicate_degree": replicas,
                     "fsdp_reshard_after_forward": case["reshard"], "prefetch": case["prefetch"]})
    right = expected(case["tied"], case["clip"])
    assert_close(run.losses(), right.losses[0], 1e-5, f"{case}: loss of step")
    assert_close(run.norms(), right.norms[0], 5e-5, f"{case}: gradient norm of step")
