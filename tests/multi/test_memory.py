"""The memory table that a run shows before its first step, against what its tensors take: at most 2 % apart."""

import pytest

TOLERANCE = 0.02
LIBRARIES = 320 << 20  # resident beside tensors: LibTorch, its threads and pools, and what the C library keeps back
ARENAS = ("parameters", "gradients", "moments")


def run_60m(program, ranks, **training):
    return program.train(ranks, model={"hf": None, "preset": "llama-60m"}, data={"eval": None},
                         lr_scheduler={"warmup_steps": 0},
                         training={"local_batch_size": 1, "seq_len": 128, "steps": 2, **training})


@pytest.mark.parametrize("training", [{}, {"dtype": "bf16", "activation_checkpoint": "full"},
                                      {"activation_checkpoint": "selective", "freeze": ["model.embed_tokens.weight"]},
                                      {"dtype": "bf16", "master_dtype": "bf16"}],
                         ids=["fp32", "bf16 and full checkpointing", "selective checkpointing, frozen embedding",
                              "bf16 masters"])
def test_peak_is_the_tables_total(training, program):
    run = run_60m(program, 4, **training)
    total, end = sum(run.start["memory"].values()), run.records[-1]
    assert abs(end["peak_tensor_bytes"] / total - 1) < TOLERANCE, (end["peak_tensor_bytes"], run.start["memory"])
    assert end["peak_rss_bytes"] < total + LIBRARIES


def test_four_shards_take_a_quarter(program):
    whole, quarter = run_60m(program, 1), run_60m(program, 4)
    for purpose in ARENAS:
        assert whole.start["memory"][purpose] / quarter.start["memory"][purpose] == pytest.approx(4, rel=1e-3), purpose
    total = sum(whole.start["memory"].values())
    assert abs(whole.records[-1]["peak_tensor_bytes"] / total - 1) < TOLERANCE
