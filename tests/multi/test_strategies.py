"""Every strategy inside one group computes what one rank computes, and what a plain PyTorch script computes.

The global batch is 12 sequences whatever the number of ranks. fp32, AdamW, warm-up and cosine, clipping at a norm that
every step exceeds, 20 steps; agreement is relative, number by number.
"""

import pytest

import reference
from multi_harness import BATCH, MODEL, STEPS, assert_close

TOLERANCE = 1e-5
DDP = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": -1}
HSDP = {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}
NO_RESHARD = {"fsdp_reshard_after_forward": False, "prefetch": 0}

# name: ranks, [parallelism], what the program calls it
LAYOUTS = {
    "fsdp 2": (2, {}, "fsdp"),
    "fsdp 3": (3, {}, "fsdp"),
    "fsdp 4": (4, {}, "fsdp"),
    "fsdp 3 kept gathered": (3, NO_RESHARD, "fsdp"),
    "ddp 2": (2, DDP, "ddp"),
    "ddp 3": (3, DDP, "ddp"),
    "ddp 4": (4, DDP, "ddp"),
    "hsdp 2x2": (4, HSDP, "hsdp"),
}


def recipe(corpus, weights):
    return reference.Recipe(weights=weights, train=corpus.train, eval=corpus.eval, seed=3, steps=STEPS, batch=BATCH,
                            max_norm=1.0, warmup_steps=5, min_lr_factor=0.1)


@pytest.fixture(scope="module")
def one_rank(module_program):
    return module_program.train(1, training={"local_batch_size": BATCH})


@pytest.fixture(scope="module")
def script(corpus, weights):
    return reference.train(recipe(corpus, weights))


def assert_same_run(run, losses, norms, eval_loss):
    assert len(run.losses()) == STEPS
    assert_close(run.losses(), losses, TOLERANCE, "loss of step")
    assert_close(run.norms(), norms, TOLERANCE, "gradient norm of step")
    assert_close([run.final_eval()["loss"]], [eval_loss], TOLERANCE, "evaluation loss")


def test_the_runs_would_show_a_difference(script):
    """The settings that the comparison is about are at work: clipping always, and learning."""
    assert min(script.norms[0]) > 1.0
    assert script.losses[0][-1] < 0.8 * script.losses[0][0]


def test_one_rank_equals_pytorch(one_rank, script):
    assert one_rank.start["strategy"] == "ddp" and one_rank.start["world"] == 1
    assert_same_run(one_rank, script.losses[0], script.norms[0], script.eval_loss)
    assert_close(one_rank.column("lr"), script.lrs, 1e-12, "learning rate of step")
    assert one_rank.final_eval()["tokens"] == script.eval_tokens
    assert sum(one_rank.traffic()[k] for k in ("intra_group", "inter_group")) == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_strategy_equals_one_rank_and_pytorch(name, program, one_rank, script):
    ranks, parallelism, strategy = LAYOUTS[name]
    run = program.train(ranks, training={"local_batch_size": BATCH // ranks}, parallelism=parallelism)
    assert (run.start["strategy"], run.start["world"], run.start["groups"]) == (strategy, ranks, [ranks])
    assert_same_run(run, one_rank.losses(), one_rank.norms(), one_rank.final_eval()["loss"])
    assert_same_run(run, script.losses[0], script.norms[0], script.eval_loss)
    assert run.column("tokens") == one_rank.column("tokens")
    assert run.final_eval()["tokens"] == script.eval_tokens


def test_tied_embeddings_equal_pytorch(program, corpus, tied_weights):
    """Head and embedding are one unit that two stages use; its gradient is the sum of both."""
    script = reference.train(recipe(corpus, tied_weights))
    run = program.train(3, model={"hf": tied_weights}, training={"local_batch_size": 4})
    assert_same_run(run, script.losses[0], script.norms[0], script.eval_loss)


def test_initial_weights_do_not_depend_on_the_layout(program):
    """Without weights to start from, the seed and the model alone decide."""
    tables = {"model": {"hf": None, "preset": "llama-tiny", **MODEL}, "lr_scheduler": {"warmup_steps": 1}}
    one = program.train(1, training={"local_batch_size": BATCH, "steps": 3}, **tables)
    three = program.train(3, training={"local_batch_size": BATCH // 3, "steps": 3}, **tables)
    assert_close(three.losses(), one.losses(), TOLERANCE, "loss of step")
    assert_close(three.norms(), one.norms(), TOLERANCE, "gradient norm of step")


def test_another_seed_is_another_run(program, one_rank):
    """Given on the command line, which wins over the file; the weights are the same, the order of the data is not."""
    other = program.train(1, training={"local_batch_size": BATCH}, overrides=["training.seed=4", "training.steps=5"])
    assert len(other.losses()) == 5
    assert abs(other.losses()[0] / one_rank.losses()[0] - 1) > 1e-4
