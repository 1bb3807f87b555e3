"""The same config twice gives the same bits: losses, gradient norms, evaluations and digests, compared as text."""

import pytest

# name: ranks, [parallelism], [training]
RUNS = {
    "fsdp fp32": (3, {}, {"dtype": "fp32", "local_batch_size": 4}),
    "one rank of two threads": (1, {}, {"dtype": "fp32", "local_batch_size": 4, "threads": 2}),
    "fl+fsdp bf16, micro-steps": (4, {"groups": 2}, {"dtype": "bf16", "reduce_dtype": "bf16", "local_batch_size": 1,
                                                     "gradient_accumulation_steps": 3}),
}


@pytest.mark.parametrize("name", RUNS)
def test_same_config_same_bits(name, program):
    ranks, parallelism, training = RUNS[name]
    tables = {"training": {"steps": 12, **training}, "parallelism": parallelism, "federation": {"every": 4},
              "validation": {"interval": 5}}
    first, second = (program.train(ranks, **tables).numbers_as_text() for _ in range(2))
    assert first == second
    steps, evals, digests = first
    groups = parallelism.get("groups", 1)
    assert len(steps) == 12 * groups and [step for step, _ in evals] == [5, 10, 12]
    assert len(digests) == (3 if groups > 1 else 0)
    # Numbers are written with all the digits that tell them apart.
    assert all(len(loss) >= 12 for _, _, loss, _ in steps)
