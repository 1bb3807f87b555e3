"""The memory table that a run shows before its first step, against what its tensors take: at most 2 % apart."""

import pytest

TOLERANCE = 0.02
LIBRARIES = 320 << 20  # resident beside tensors: LibTorch, its threads and pools, and what the C library keeps back
ARENAS = ("parameters", "gradients", "moments")


def run_60m(program, ranks, **training):
    return program.train(ranks, model={"hf": None, "preset": "llama-60m"}, data={"eval": None},
                         lr_scheduler={"warmup_steps": 0},
                         training={"local_batch_size": 1, "seq_len": 128, "steps": 2, **training})


# Activations outweigh parameters; with parts frozen, what the first trained block keeps of what comes before it, or a
# head without a gradient, is a large part of them.
@pytest.mark.parametrize("training, vocabulary", [
    ({"activation_checkpoint": "full"}, 257), ({}, 257),
    ({"freeze": ["model.layers.[0-5].*", "model.embed_tokens.weight"]}, 257),
    ({"freeze": ["model.embed_tokens.weight"], "activation_checkpoint": "full"}, 257),
    ({"freeze": ["lm_head.weight"]}, 8003)],
    ids=["full checkpointing", "no checkpointing", "frozen early blocks", "full checkpointing, frozen embedding",
         "frozen head"])
def test_peak_where_activations_outweigh_parameters(training, vocabulary, program):
    run = program.train(2, model={"hf": None, "preset": "llama-tiny", "hidden_size": 128, "intermediate_size": 344,
                                  "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
                                  "vocab_size": vocabulary, "max_position_embeddings": 256},
                        data={"eval": None}, lr_scheduler={"warmup_steps": 0},
                        training={"local_batch_size": 8, "seq_len": 256, "steps": 2, **training})
    total, peak = sum(run.start["memory"].values()), run.records[-1]["peak_tensor_bytes"]
    assert abs(peak / total - 1) < TOLERANCE, (peak / total, peak, run.start["memory"])


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


def run_federated(program, federation, **training):
    return program.train(4, model={"hf": None, "preset": "llama-60m"}, data={"eval": None},
                         lr_scheduler={"warmup_steps": 0}, parallelism={"groups": 2},
                         federation={"every": 1, **federation},
                         training={"local_batch_size": 1, "seq_len": 128, "steps": 2, **training})


# Between rounds' exchanges and steps the table's total is an upper bound, so what is added to it is measured alone.
@pytest.mark.parametrize("training", [{}, {"dtype": "bf16", "master_dtype": "bf16"}], ids=["fp32", "bf16 masters"])
def test_fedprox_adds_its_row_to_the_peak(training, program):
    plain, with_term = (run_federated(program, {"prox_mu": mu}, **training) for mu in (0, 0.1))
    row = with_term.start["memory"]["prox_anchor"]
    assert row == plain.start["memory"]["parameters"] > 0
    added = with_term.records[-1]["peak_tensor_bytes"] - plain.records[-1]["peak_tensor_bytes"]
    assert abs(added / row - 1) < TOLERANCE, (added, row)


def test_a_step_of_the_warm_up_takes_what_a_round_does(program):
    rounds, warm_up = (run_federated(program, {"start_step": start}) for start in (0, 2))
    assert warm_up.start["memory"] == rounds.start["memory"]
    assert warm_up.records[-1]["peak_tensor_bytes"] == pytest.approx(rounds.records[-1]["peak_tensor_bytes"], rel=TOLERANCE)
    # Of bf16 masters a round exchanges half as much, and gradients are fp32 all the same.
    narrow = run_federated(program, {"start_step": 2}, master_dtype="bf16")
    assert narrow.start["memory"]["exchange"] == rounds.start["memory"]["exchange"]
    assert narrow.records[-1]["peak_tensor_bytes"] <= sum(narrow.start["memory"].values())
