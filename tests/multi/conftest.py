"""Data, weights and the program, made once for the folder's tests."""

import types

import pytest
import torch
import transformers

from multi_harness import BINARY, MODEL, SEQ_LEN, STEPS, Program, clean_environment, make_text, run_process


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Token files. A run of 20 steps takes 240 sequences of the 140 in `train`, so the order enters a second epoch; the
    17 in `eval` divide by no number of ranks here."""
    folder = tmp_path_factory.mktemp("corpus")
    files = {}
    for name, length, seed in (("train", 4500, 1), ("eval", 560, 2)):
        (folder / f"{name}.txt").write_text(make_text(length, seed))
        files[name] = folder / f"{name}.tokens"
        done = run_process([BINARY, "data", "prepare", folder / f"{name}.txt", "-o", files[name]], clean_environment())
        assert done.returncode == 0, done.stderr
    return types.SimpleNamespace(**files)


def save_weights(folder, **keys):
    """A random model as transformers saves it. Norms are not all ones, and matrices large enough for attention to be
    far from uniform."""
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**MODEL, **keys}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(*((1.0, 0.2) if "norm" in name else (0.0, 0.1)))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    return save_weights(tmp_path_factory.mktemp("weights") / "untied", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_weights(tmp_path_factory):
    return save_weights(tmp_path_factory.mktemp("weights") / "tied", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def base_config(corpus, weights):
    """What all runs share: fp32, AdamW with warm-up, cosine and clipping. Tests lay tables over it."""
    return {
        "model": {"hf": weights},
        "data": {"train": corpus.train, "eval": corpus.eval},
        "training": {"dtype": "fp32", "reduce_dtype": "fp32", "local_batch_size": 3, "seq_len": SEQ_LEN, "steps": STEPS,
                     "max_norm": 1.0, "seed": 3, "threads": 1},
        "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
        "lr_scheduler": {"warmup_steps": 5, "decay": "cosine", "min_lr_factor": 0.1},
    }


@pytest.fixture
def program(tmp_path, base_config):
    return Program(tmp_path, base_config)


@pytest.fixture(scope="module")
def module_program(tmp_path_factory, base_config):
    """For runs that several tests of a module compare with."""
    return Program(tmp_path_factory.mktemp("module"), base_config)
