"""Training the demo's model with compressed rounds ends where training with whole ones does, on real text.

Here with a text that Python brings along, on two ranks and for fewer steps. Where FEDSHARD_DEMO_TEXT names the demo's
text (`make compression-evidence`), with the demo's own layout and for as many steps as docs/federation.md tells of.

The learning rate is a third of the demo's. At 3e-3 training is chaotic: a last bit in one sum moves the perplexity by
2 %, and 1 % could not be told. At 1e-3 that moves it by a millionth.
"""

import os
import pathlib
import pydoc_data
import sys

import pytest

from multi_harness import ROOT, clean_environment, run_process

DEMO_TEXT = os.environ.get("FEDSHARD_DEMO_TEXT")
STEPS = 320 if DEMO_TEXT else 160
RANKS = 4 if DEMO_TEXT else 2


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    if DEMO_TEXT:
        return pathlib.Path(DEMO_TEXT).resolve()
    folder = tmp_path_factory.mktemp("text")
    done = run_process([sys.executable, ROOT / "scripts/demo_split.py", folder, f"help={pydoc_data.__path__[0]}"],
                       clean_environment())
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def train(module_program, text):
    """The perplexity of a run with these keys of [federation], and its bytes between groups."""
    def run(**federation):
        done = module_program.train(
            RANKS, model={"hf": None, "preset": "llama-tiny"},
            data={"train": str(text / "train/*.jsonl"), "eval": str(text / "eval/*.jsonl"), "tokenizer": "byte"},
            training={"local_batch_size": 8 // RANKS, "seq_len": 256, "steps": STEPS, "seed": 1, "threads": 1},
            optimizer={"lr": 1e-3}, lr_scheduler={"warmup_steps": 20}, validation={"steps": 60},
            parallelism={"groups": 2}, federation={"every": 8, **federation})
        assert len(done.of("round")) == STEPS // 8 and all(r["left_out"] == [] for r in done.of("round"))
        perplexity, sent = done.final_eval()["perplexity"], done.traffic()["inter_group"]
        print(f"\n{federation}: perplexity {perplexity:.3f}, {sent / 2**20:.1f} MiB between groups")
        return perplexity, sent
    return run


@pytest.fixture(scope="module")
def whole(train):
    return train()


@pytest.mark.parametrize("compress, most", [("int8", 0.26), ("int4", 0.135)])
def test_int8_and_int4_end_within_a_hundredth(compress, most, train, whole):
    perplexity, sent = train(compress=compress)
    assert perplexity == pytest.approx(whole[0], rel=0.01)
    assert sent < most * whole[1]


def test_topk_ends_elsewhere_but_not_lost(train, whole):
    """So the measure can tell: over so few rounds topk still owes a part of what groups have learnt, and without error
    feedback it would end at six times the perplexity."""
    assert 1.05 * whole[0] < train(compress="topk")[0] < 2 * whole[0]
