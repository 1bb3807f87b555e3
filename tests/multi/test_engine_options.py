"""What the engine's options do in a whole run: freezing, fused steps, skipped steps, packed documents."""

import json

import pytest

from multi_harness import BATCH, STEPS, assert_close, with_nan

FUSED = {"max_norm": 0.0}


def test_fused_backward_changes_no_loss(program):
    plain = program.train(3, training={"local_batch_size": 4, **FUSED})
    fused = program.train(3, training={"local_batch_size": 4, **FUSED}, optimizer={"fused_backward": True})
    assert_close(fused.losses(), plain.losses(), 1e-6, "loss of step")
    assert_close(fused.norms(), plain.norms(), 1e-6, "gradient norm of step")
    assert fused.start["memory"]["gradients"] < plain.start["memory"]["gradients"]
    assert fused.traffic() | {"time_s": 0, "control": 0, "intra_group": 0} == \
        plain.traffic() | {"time_s": 0, "control": 0, "intra_group": 0}


def test_frozen_parts_are_the_same_for_every_layout(program):
    """A whole unit, a part of each block's unit, and one of the two tables."""
    freeze = ["model.embed_tokens.weight", "model.layers.*norm*"]
    runs = [program.train(ranks, training={"local_batch_size": BATCH // ranks, "freeze": freeze},
                          parallelism=parallelism)
            for ranks, parallelism in ((1, {}), (3, {}), (4, {"data_parallel_shard_degree": 2,
                                                              "data_parallel_replicate_degree": 2}))]
    for run in runs[1:]:
        assert_close(run.losses(), runs[0].losses(), 1e-5, "loss of step")
        assert_close(run.norms(), runs[0].norms(), 5e-5, "gradient norm of step")
        assert_close([run.final_eval()["loss"]], [runs[0].final_eval()["loss"]], 1e-5, "evaluation loss")
    trained = program.train(1, training={"local_batch_size": BATCH})
    assert runs[0].norms()[0] < trained.norms()[0]
    assert runs[0].start["memory"]["moments"] < trained.start["memory"]["moments"]


def test_frozen_parts_have_no_part_in_a_round(program):
    federated = {"parallelism": {"groups": 2}, "federation": {"every": 5}}
    frozen = program.train(4, training={"freeze": "model.embed_tokens.weight"}, **federated)
    whole = program.train(4, **federated)
    hidden, vocabulary = 32, 257
    difference = whole.traffic()["aggregate"] - frozen.traffic()["aggregate"]
    assert difference == (STEPS // 5) * 2 * hidden * vocabulary * 4
    assert len({r["digest"] for r in frozen.of("round")}) == STEPS // 5


@pytest.mark.parametrize("ranks", [1, 3])
def test_steps_that_are_not_finite_are_skipped_on_all_ranks(ranks, program, weights, tmp_path):
    model = with_nan(tmp_path / "nan", weights)
    run = program.train(ranks, model={"hf": model}, data={"eval": None},
                        training={"local_batch_size": 1, "seq_len": 8, "steps": 30, "nonfinite": "skip"})
    steps = run.of("step")
    skipped = [s for s in steps if s["loss"] is None]
    assert 0 < len(skipped) < len(steps)
    assert all("loss" in s["nonfinite"] for s in skipped)
    # Skipped steps train on no token, and the others go on: no NaN has reached the parameters.
    assert steps[-1]["tokens"] == (len(steps) - len(skipped)) * ranks * 8
    assert any(s["loss"] is not None for s in steps[-5:])
    assert run.records[-1]["skipped"] == len(skipped)


def test_a_round_of_groups_that_have_all_skipped_changes_nothing(program):
    """A learning rate that spoils the model in its first step: from then on everything is skipped."""
    run = program.train(2, data={"eval": None}, parallelism={"groups": 2}, federation={"every": 1},
                        training={"local_batch_size": 1, "steps": 6, "max_norm": 0.0, "nonfinite": "skip"},
                        optimizer={"name": "sgd", "lr": 1e30, "weight_decay": 0.0}, lr_scheduler={"warmup_steps": 0})
    rounds = run.of("round")
    assert len(rounds) == 6
    assert rounds[-1]["weights"] == [0.5, 0.5]
    assert rounds[-1]["digest"] == rounds[-2]["digest"]


def test_a_round_after_one_group_has_skipped_steps(program, weights, tmp_path):
    """A NaN that stays with its group, where it spoils the steps that read it: groups' optimizers count differently, and
    a round weighs them by what they have trained on."""
    model = with_nan(tmp_path / "nan", weights)
    run = program.train(3, model={"hf": model}, data={"eval": None}, parallelism={"groups": [1, 2]},
                        federation={"every": 5, "exclude": "model.embed_tokens.weight"},
                        training={"local_batch_size": 1, "seq_len": 8, "steps": 30, "nonfinite": "skip"})
    done = [[s["loss"] is not None for s in run.of("step", group=g)] for g in (0, 1)]
    assert 0 < sum(done[1]) < sum(done[0]) < 30  # a group of two reads more
    rounds = run.of("round")
    assert len(rounds) == 6 and any(r["weights"] not in ([1 / 3, 2 / 3], [1, 0]) for r in rounds)
    for i, r in enumerate(rounds):
        tokens = [ranks * sum(done[g][5 * i:5 * i + 5]) for g, ranks in enumerate((1, 2))]
        assert r["weights"] == [t / sum(tokens) for t in tokens] and r["left_out"] == []
        assert None not in r["drift"]


def test_documents_are_kept_apart(program, tmp_path):
    lines = tmp_path / "documents.jsonl"
    lines.write_text("".join(json.dumps({"text": f"{i} is {i * 7 % 13}. " * (1 + i % 3)}) + "\n" for i in range(400)))
    data = {"train": lines, "eval": lines}
    apart = [program.train(ranks, data=data, training={"document_mask": True, "local_batch_size": BATCH // ranks})
             for ranks in (1, 4)]
    assert_close(apart[1].losses(), apart[0].losses(), 1e-5, "loss of step")
    together = program.train(1, data=data, training={"local_batch_size": BATCH})
    assert abs(together.losses()[0] - apart[0].losses()[0]) > 1e-4  # it does something
    assert together.final_eval()["tokens"] == apart[0].final_eval()["tokens"]
