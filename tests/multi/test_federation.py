"""Federated runs equal a reference that trains the groups in turn, in one process, and averages them every K steps.

Losses agree to 1e-6 relative (measured: 2e-7, the rounding of fp32). Gradient norms get 1e-5, because torch's own
clipping, the oracle, sums squares in fp32; measured: 7e-7.
"""

import re

import numpy
import pytest
import safetensors.numpy

import reference
from multi_harness import BATCH, MODEL, STEPS, VOCABULARY, assert_close

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


# The same, of groups whose sizes or degrees differ.
UNEQUAL = {
    "one rank and three shards": (4, 12, {"groups": [1, 3]}, {"every": 4, "weights": "tokens"}, "fl+fsdp"),
    "one rank and three shards, each group alike": (4, 12, {"groups": [1, 3]}, {"every": 4, "weights": "uniform"},
                                                    "fl+fsdp"),
    "four, two and two ranks in pairs of shards": (
        8, 16, {"groups": [4, 2, 2], "data_parallel_shard_degree": 2, "data_parallel_replicate_degree": -1},
        {"every": 4, "weights": "tokens"}, "fl+hsdp"),
    "other shards and other replicas": (
        7, 14, {"groups": [4, 3], "data_parallel_shard_degree": [2, 3], "data_parallel_replicate_degree": -1},
        {"every": 8, "weights": "tokens"}, "fl+hsdp"),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_groups_equal_the_reference(name, program, corpus, weights):
    """Every rank brings as many sequences, so a larger group sees more of them and, by tokens, counts for more."""
    ranks, batch, parallelism, federation, strategy = UNEQUAL[name]
    run = program.train(ranks, training={"local_batch_size": batch // ranks}, parallelism=parallelism,
                        federation=federation)
    sizes = parallelism["groups"]
    assert run.start["strategy"] == strategy and run.start["groups"] == sizes
    counts = sizes if federation["weights"] == "tokens" else [1] * len(sizes)
    averaging = [count / sum(counts) for count in counts]
    assert [r["step"] for r in run.of("round")] == list(range(federation["every"], STEPS + 1, federation["every"]))
    assert all(r["weights"] == pytest.approx(averaging, rel=1e-15) and min(r["drift"]) > 0 for r in run.of("round"))
    expected = reference.train(recipe(corpus, weights, batch=batch, groups=run.groups, every=federation["every"],
                                      max_norm=1.0, shares=tuple(batch // ranks * size for size in sizes),
                                      averaging=tuple(averaging)))
    for group in range(run.groups):
        assert_close(run.losses(group), expected.losses[group], 1e-6, f"group {group}: loss of step")
        assert_close(run.norms(group), expected.norms[group], 1e-5, f"group {group}: gradient norm of step")
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 1e-6, "evaluation loss")
    assert run.final_eval()["tokens"] == expected.eval_tokens


def train_with_nesterov(program, lr, momentum):
    return program.train(4, training={"local_batch_size": 3}, parallelism={"groups": [1, 3]},
                         federation={"every": 4, "weights": [3, 1], "outer": "nesterov", "outer_lr": lr,
                                     "outer_momentum": momentum})


def test_nesterov_is_torchs_sgd_over_pseudo_gradients(program, corpus, weights):
    """Of unequal groups with weights from a list. The mean that is evaluated last is that of a round's end."""
    run = train_with_nesterov(program, 0.7, 0.9)
    assert all(r["weights"] == [0.75, 0.25] for r in run.of("round"))
    expected = reference.train(recipe(corpus, weights, groups=2, every=4, max_norm=1.0, shares=(3, 9),
                                      averaging=(0.75, 0.25), nesterov=(0.7, 0.9)))
    for group in range(2):
        assert_close(run.losses(group), expected.losses[group], 2e-6, f"group {group}: loss of step")
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 2e-6, "evaluation loss")


def test_an_outer_rate_of_0_changes_nothing_and_one_of_1_without_momentum_is_fedavg(program, weights):
    still = train_with_nesterov(program, 0.0, 0.9)
    assert {r["digest"] for r in still.of("round")} == {digest_of(weights)}
    plain = program.train(4, training={"local_batch_size": 3}, parallelism={"groups": [1, 3]},
                          federation={"every": 4, "weights": [3, 1]})
    assert train_with_nesterov(program, 1.0, 0.0).numbers_as_text() == plain.numbers_as_text()


@pytest.mark.parametrize("every", [4, [3, 4]])
def test_averaged_moments(every, program, corpus, weights):
    """Of groups that may have made unlike numbers of updates."""
    def losses(run, group):
        return [r["loss"] for r in run.of("step") if r["group"] == group]

    def train(inner_state):
        return program.train(4, training={"local_batch_size": 3}, parallelism={"groups": [1, 3]},
                             federation={"every": every, "weights": [3, 1], "inner_state": inner_state})

    run, kept = train("average"), train("keep")
    expected = reference.train(recipe(corpus, weights, groups=2, every=every, max_norm=1.0, shares=(3, 9),
                                      averaging=(0.75, 0.25), average_moments=True))
    for group in range(2):
        assert_close(losses(run, group), expected.losses[group], 2e-6, f"group {group}: loss of step")
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 2e-6, "evaluation loss")
    assert losses(kept, 1)[:4] == losses(run, 1)[:4] and losses(kept, 1)[-1] != losses(run, 1)[-1]


@pytest.mark.parametrize("outer", ["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_outer_optimizers_train(outer, program):
    """Each in a layout of its own; that they follow their formulas is proven in unit tests, here that they are run."""
    run = program.train(4, training={"local_batch_size": 3}, parallelism={"groups": 2},
                        federation={"every": 4, "outer": outer, "outer_max_norm": 1.0, "inner_state": "reset"})
    losses = run.losses(0)
    assert losses[-1] < losses[0] and run.start["memory"]["outer"] > 0
    assert run.records[-1]["skipped"] == 0  # optimizers that start anew have skipped nothing


@pytest.fixture(scope="module")
def uncompressed(module_program):
    return module_program.train(4, training={"local_batch_size": 3}, parallelism={"groups": [1, 3]},
                                federation={"every": 4})


@pytest.mark.parametrize("compress", ["bf16", "int8", "int4", "topk"])
def test_compressed_changes_train_like_whole_ones(compress, program, uncompressed):
    """With blocks small enough for this small model. 1 % for all that send every element; topk sends a half of them
    and over so few rounds still holds back some."""
    settings = {"int8": {"block": 64}, "int4": {"block": 32}, "topk": {"block": 64, "top_k": 32}}.get(compress, {})
    run = program.train(4, training={"local_batch_size": 3}, parallelism={"groups": [1, 3]},
                        federation={"every": 4, "compress": compress, **settings})
    assert run.final_eval()["perplexity"] == pytest.approx(uncompressed.final_eval()["perplexity"],
                                                           rel=0.01 if compress != "topk" else 0.1)
    assert run.numbers_as_text() != uncompressed.numbers_as_text()
    assert run.traffic()["aggregate"] < 0.55 * uncompressed.traffic()["aggregate"]
    # Of a model this small the pieces that an outer step works on are as large as the slice: tests/multi/test_memory.py
    # has larger ones.
    assert run.records[-1]["peak_tensor_bytes"] < 1.1 * run.start["memory_peak"]


# The model's parameters, with its blocks' names cut short.
SIZES = {"model.embed_tokens": VOCABULARY * 32, "model.norm": 32, "lm_head": VOCABULARY * 32,
         "norms of blocks": 2 * 2 * 32, "matrices of blocks": 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 56)}
NORMS_AND_EMBEDDING = ["*norm*", "model.embed_tokens.weight"]


def between(groups, left_out):
    """Bytes of a round of fp32 parameters between groups."""
    return 2 * (groups - 1) * 4 * (sum(SIZES.values()) - sum(SIZES[name] for name in left_out))


@pytest.mark.parametrize("nesterov", [(), (0.7, 0.9)], ids=["mean", "nesterov"])
@pytest.mark.parametrize("sizes", [[2, 2], [1, 3]], ids=["equal", "unequal"])
def test_group_local_parameters_equal_the_reference(sizes, nesterov, program, corpus, weights):
    outer = {"outer": "nesterov", "outer_lr": nesterov[0], "outer_momentum": nesterov[1]} if nesterov else {}
    run = program.train(4, training={"local_batch_size": 3}, parallelism={"groups": sizes},
                        federation={"every": 4, "exclude": NORMS_AND_EMBEDDING, **outer})
    shared = {"groups": 2, "every": 4, "max_norm": 1.0, "shares": tuple(3 * size for size in sizes),
              "averaging": tuple(size / 4 for size in sizes), "nesterov": nesterov}
    expected = reference.train(recipe(corpus, weights, group_local=NORMS_AND_EMBEDDING, ranks=tuple(sizes), **shared))
    for group in range(2):
        assert_close(run.losses(group), expected.losses[group], 2e-6, f"group {group}: loss of step")
        assert_close(run.norms(group), expected.norms[group], 1e-5, f"group {group}: gradient norm of step")
    assert_close([run.final_eval()["loss"]], [expected.eval_loss], 2e-6, "evaluation loss")
    assert run.final_eval()["tokens"] == expected.eval_tokens
    whole = reference.train(recipe(corpus, weights, **shared))
    assert abs(whole.losses[1][-1] / expected.losses[1][-1] - 1) > 1e-4  # it does something
    assert run.traffic()["aggregate"] == 5 * between(2, ["model.embed_tokens", "model.norm", "norms of blocks"])
    assert run.records[-1]["peak_tensor_bytes"] < 1.02 * run.start["memory_peak"]


def test_rounds_may_exchange_one_small_parameter(program):
    """32 elements over groups of two shards by two replicas and of three shards."""
    parallelism = {"groups": [4, 3], "data_parallel_shard_degree": [2, 3], "data_parallel_replicate_degree": -1}
    run = program.train(7, training={"local_batch_size": 2}, parallelism=parallelism,
                        federation={"every": 4, "include": "model.norm.weight"})
    others = [name for name in SIZES if name != "model.norm"]
    inside = (2 - 1) * 32 * 4
    assert run.traffic()["aggregate"] == 5 * (between(2, others) + inside)
    assert len({r["digest"] for r in run.of("round")}) == 5


def test_group_local_parameters_leave_compressed_rounds_alone(program):
    keys = {"every": 4, "outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.5, "exclude": NORMS_AND_EMBEDDING}
    plain, compressed = (program.train(4, training={"local_batch_size": 3}, parallelism={"groups": [1, 3]},
                                       federation={**keys, **more})
                         for more in ({}, {"compress": "int8", "block": 64}))
    assert compressed.final_eval()["perplexity"] == pytest.approx(plain.final_eval()["perplexity"], rel=0.01)
    assert compressed.numbers_as_text() != plain.numbers_as_text()
    assert 0.25 < compressed.traffic()["aggregate"] / plain.traffic()["aggregate"] < 0.28  # (64 + 4) / 256 and ends
    assert compressed.start["memory"]["outer"] > plain.start["memory"]["outer"] > 0


def test_a_groups_weight_may_be_nothing(program):
    """It trains, and at each round takes what the others have made of the model."""
    run = program.train(2, training={"local_batch_size": 6}, parallelism={"groups": 2},
                        federation={"every": 4, "weights": [1, 0]})
    assert all(r["weights"] == [1, 0] and r["drift"][0] == 0 < r["drift"][1] for r in run.of("round"))


def test_unequal_degrees_are_recorded_by_group(program):
    run = program.train(3, training={"local_batch_size": 1, "steps": 6}, parallelism={"groups": [1, 2]})
    assert run.start["shard"] == [1, 2] and run.start["replicas"] == 1


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
        run = program.train(4, training={"steps": 6}, parallelism={"groups": groups},
                            federation={"every": 2, "exclude": "*norm*"})
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


@pytest.mark.parametrize("ranks, parallelism", [(3, {"groups": 3}), (8, {"groups": 2, **HSDP}),
                                                (6, {"groups": [1, 3, 2]})])
def test_a_round_without_training_changes_no_bit(ranks, parallelism, program, weights):
    """With learning rate 0 every group brings what it started with, and the mean of equal numbers is that number: the
    digest is that of the file, in every layout, also where a weight of 1/3 is not exact."""
    run = program.train(ranks, training={"local_batch_size": 1, "steps": 2}, optimizer={"lr": 0.0},
                        lr_scheduler={"warmup_steps": 0}, parallelism=parallelism, federation={"every": 1})
    assert [r["digest"] for r in run.of("round")] == [digest_of(weights)] * 2
    assert [r["drift"] for r in run.of("round")] == [[0.0] * run.groups] * 2
