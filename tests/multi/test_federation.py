"""Federated runs equal a reference that trains the groups in turn, in one process, and averages them every K steps.

Losses agree to 1e-6 relative (measured: 2e-7, the rounding of fp32). Gradient norms get 1e-5, because torch's own
clipping, the oracle, sums squares in fp32; measured: 7e-7.
"""

import re

import numpy
import pytest
import safetensors.numpy

import reference
from multi_harness import BATCH, MODEL, STEPS, assert_close

DDP = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": -1}
HSDP = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}

# name: ranks, sequences a step, [parallelism], [federation], what the program calls it
FEDERATIONS = {
    "two groups of one rank": (2, 12, {"groups": 2}, {"every": 4, "weights": "uniform"}, "fl+ddp"),
    "two groups of two replicas": (4, 12, {"groups": 2, **DDP}, {"every": 5, "weights": "tokens"}, "fl+ddp"),
    "two groups of two shards": (4, 12, {"groups": [2, 2]}, {"every": 4, "weights": "tokens"}, "fl+fsdp"),
    "two groups of 2 x 2": (8, 16, {"groups": 2, **HSDP}, {"every": 4, "weights": "tokens"}, "fl+hsdp"),
    "three groups, ends between rounds": (3, 12, {"groups": 3}, {"every": 8, "weights": "tokens"}, "fl+ddp"),
    "no round at all": (2, 12, {"groups": 2}, {"every": 50, "weights": "uniform"}, "fl+ddp"),
}


def recipe(corpus, weights, **keys):
    return reference.Recipe(**{"weights": weights, "train": corpus.train, "eval": corpus.eval, "seed": 3,
                               "steps": STEPS, "batch": BATCH, "warmup_steps": 5, "min_lr_factor": 0.1, **keys})


def assert_rounds(run, every):
    """A record for every round that was due, with all groups in it, and a digest of what they agreed on."""
    rounds = run.of("round")
    assert [(r["round"], r["step"]) for r in rounds] == [(i + 1, (i + 1) * every) for i in range(STEPS // every)]
    for r in rounds:
        assert r["participants"] == list(range(run.groups))
        # All groups train on equally many tokens here, so both ways of weighing agree.
        assert r["weights"] == pytest.approx([1 / run.groups] * run.groups, rel=1e-15)
        assert re.fullmatch("[0-9a-f]{16}", r["digest"])
        assert len(r["drift"]) == run.groups and min(r["drift"]) > 0
    assert len({r["digest"] for r in rounds}) == len(rounds)


@pytest.mark.parametrize("name", FEDERATIONS)
def test_groups_equal_the_reference(name, program, corpus, weights):
    ranks, batch, parallelism, federation, strategy = FEDERATIONS[name]
    run = program.train(ranks, training={"local_batch_size": batch // ranks}, parallelism=parallelism,
                        federation=federation)
    assert run.start["strategy"] == strategy
    assert_rounds(run, federation["every"])
    expected = reference.train(recipe(corpus, weights, batch=batch, groups=run.groups, every=federation["every"],
                                      max_norm=1.0))
    for group in range(run.groups):
        assert_close(run.losses(group), expected.losses[group], 1e-6, f"group {group}: loss of step")
        assert_close(run.norms(group), expected.norms[group], 1e-5, f"group {group}: gradient norm of step")
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 1e-6, "evaluation loss")
    assert run.final_eval()["model"] == "mean" and run.final_eval()["tokens"] == expected.eval_tokens


def test_the_reference_tells_averaging_from_none(corpus, weights):
    """What the tests above hold to 1e-6 moves a thousand times as much when the groups are averaged otherwise."""
    losses = [reference.train(recipe(corpus, weights, steps=8, groups=2, every=every, max_norm=1.0)).losses[1][-1]
              for every in (4, 2, 0)]
    for i in range(3):
        for j in range(i):
            assert abs(losses[i] / losses[j] - 1) > 1e-3


# name: ranks, [parallelism], momentum
ONE_STEP_ROUNDS = {"fl+fsdp": (4, {"groups": 2}, 0.0), "fl+ddp": (4, {"groups": 4}, 0.9)}


@pytest.mark.parametrize("strategy", ONE_STEP_ROUNDS)
def test_k1_with_sgd_equals_one_process_on_all_sequences(strategy, program, corpus, weights):
    """The mean of the groups' updates is the update by the mean gradient; momentum is linear too, clipping is not."""
    ranks, parallelism, momentum = ONE_STEP_ROUNDS[strategy]
    sgd = {"lr": 0.05, "weight_decay": 0.01, "momentum": momentum}
    tables = {"optimizer": {"name": "sgd", **sgd}, "federation": {"every": 1}}
    run = program.train(ranks, training={"local_batch_size": BATCH // ranks, "max_norm": 0}, parallelism=parallelism,
                        **tables)
    assert run.start["strategy"] == strategy
    assert_rounds(run, 1)
    mean_losses = [sum(losses) / run.groups for losses in zip(*(run.losses(g) for g in range(run.groups)))]
    one = program.train(1, training={"local_batch_size": BATCH, "max_norm": 0}, **tables)
    script = reference.train(recipe(corpus, weights, optimizer="sgd", **sgd))
    for losses, eval_loss in ((one.losses(), one.final_eval()["loss"]), (script.losses[0], script.eval_loss)):
        assert_close(mean_losses, losses, 1e-5, "mean loss of step")
        assert_close([run.final_eval()["loss"]], [eval_loss], 1e-5, "evaluation loss")


def test_one_group_is_fsdp_to_the_bit(program):
    plain = program.train(4, training={"steps": 6})
    for groups in (1, [4]):
        run = program.train(4, training={"steps": 6}, parallelism={"groups": groups}, federation={"every": 2})
        assert run.start["strategy"] == "fsdp"
        assert run.of("round") == [] and run.traffic()["inter_group"] == 0
        assert run.numbers_as_text() == plain.numbers_as_text()


def digest_of(weights):
    """The sum over all elements of a mix of global index and bits, written down anew. The global index counts the
    parameters in the order of the units: embedding, blocks, final norm and head."""
    tensors = safetensors.numpy.load_file(weights / "model.safetensors")
    names = ["model.embed_tokens"]
    for layer in range(MODEL["num_hidden_layers"]):
        names += [f"model.layers.{layer}.{module}" for module in (
            "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    names += ["model.norm", "lm_head"]
    bits = numpy.concatenate([tensors.pop(name + ".weight").ravel() for name in names]).view(numpy.uint32)
    assert not tensors

    def finalise(z):
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return z ^ (z >> numpy.uint64(31))

    index = numpy.arange(bits.size, dtype=numpy.uint64)
    mixed = finalise(finalise(index + numpy.uint64(0x9E3779B97F4A7C15)) ^ bits.astype(numpy.uint64))
    return f"{int(mixed.sum(dtype=numpy.uint64)):016x}"


@pytest.mark.parametrize("ranks, parallelism", [(3, {"groups": 3}), (8, {"groups": 2, **HSDP})])
def test_a_round_without_training_changes_no_bit(ranks, parallelism, program, weights):
    """With learning rate 0 every group brings what it started with, and the mean of equal numbers is that number: the
    digest is that of the file, in every layout, also where a weight of 1/3 is not exact."""
    run = program.train(ranks, training={"local_batch_size": 1, "steps": 2}, optimizer={"lr": 0.0},
                        lr_scheduler={"warmup_steps": 0}, parallelism=parallelism, federation={"every": 1})
    assert [r["digest"] for r in run.of("round")] == [digest_of(weights)] * 2
    assert [r["drift"] for r in run.of("round")] == [[0.0] * run.groups] * 2
