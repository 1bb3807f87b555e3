"""Our Llama against transformers': rotary frequencies, logits, loss and the gradient of every parameter.

transformers makes a random model and saves it; llama_probe (beside this file) reads the folder, runs our stages on the
same batch and writes what it got. Errors are measured per tensor as max|a - b| / max|b|, b being transformers'.
"""

import os
import pathlib
import subprocess

import pytest
import safetensors.torch
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROBE = ROOT / os.environ.get("FEDSHARD_BUILD", "build/release") / "tests" / "llama_probe"

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SIZES = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256}

# Each: config keys beyond SIZES, and the tokens of a sequence.
MODELS = {
    "untied": ({}, 37),
    "tied": ({"tie_word_embeddings": True}, 37),
    "llama3_rope_beyond_original": ({"rope_parameters": LLAMA3_ROPE}, 200),
    "llama3_rope_tied": ({"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}, 64),
    "one_kv_head_a_head": ({"num_key_value_heads": 8}, 16),
    "one_kv_head": ({"num_key_value_heads": 1, "rms_norm_eps": 1e-5}, 16),
    "wide_heads": ({"head_dim": 24}, 16),
    "one_token": ({}, 1),
}


def make_model(**keys):
    """A random model whose norms are not all ones and whose attention is far from uniform."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**{**SIZES, **keys}, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def make_batch(vocabulary, tokens, sequences=2):
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, vocabulary, (sequences, tokens + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, 2::5] = -100  # masked positions
    return {"tokens": ids[:, :-1].contiguous(), "labels": labels.contiguous()}


def run_reference(model, batch, dtype):
    model = model.to(dtype)
    model.zero_grad()
    # num_items_in_batch = 1 turns transformers' mean into the sum over unmasked labels.
    result = model(input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"],
                   num_items_in_batch=1, use_cache=False)
    result.loss.backward()
    tensors = {"inv_freq": model.model.rotary_emb.inv_freq, "logits": result.logits, "loss": result.loss}
    for name, parameter in model.named_parameters():
        tensors["grad." + name] = parameter.grad
    return {name: tensor.detach().float().clone() for name, tensor in tensors.items()}


def run_probe(folder, batch, dtype, tmp_path):
    safetensors.torch.save_file(batch, tmp_path / "batch.safetensors")
    subprocess.run([PROBE, folder, tmp_path / "batch.safetensors", tmp_path / "out.safetensors", dtype], check=True,
                   env={**os.environ, "OMP_NUM_THREADS": "2"})
    return safetensors.torch.load_file(tmp_path / "out.safetensors")


def error(ours, theirs):
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def compare(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    errors = {name: error(ours[name], theirs[name]) for name in theirs}
    beyond = {name: value for name, value in errors.items() if not value <= tolerance}
    assert not beyond, beyond


@pytest.mark.parametrize("name", MODELS)
def test_fp32_equals_transformers(name, tmp_path):
    keys, tokens = MODELS[name]
    model = make_model(**keys)
    model.save_pretrained(tmp_path / "hf")
    batch = make_batch(model.config.vocab_size, tokens)
    theirs = run_reference(model, batch, torch.float32)
    ours = run_probe(tmp_path / "hf", batch, "fp32", tmp_path)
    assert torch.equal(ours["inv_freq"], theirs["inv_freq"])
    if tokens == 1:
        # Softmax over one token is constant: these gradients are zero, and rounding is all that is left of them.
        for layer in range(2):
            for part in ("q_proj", "k_proj"):
                key = f"grad.model.layers.{layer}.self_attn.{part}.weight"
                assert ours.pop(key).abs().max() < 1e-6 and theirs.pop(key).abs().max() < 1e-6
    compare(ours, theirs, 1e-5)
