"""Files that are wrong in one way each, beside right ones, and the folder of a tiny Hugging Face model."""

import json
import struct

import numpy
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

HF_CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 16,
             "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
             "vocab_size": 257, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
             "tie_word_embeddings": True}
HF_SHAPES = {"model.embed_tokens.weight": (257, 16), "model.norm.weight": (16,),
             "model.layers.0.input_layernorm.weight": (16,), "model.layers.0.post_attention_layernorm.weight": (16,),
             "model.layers.0.self_attn.q_proj.weight": (16, 16), "model.layers.0.self_attn.k_proj.weight": (8, 16),
             "model.layers.0.self_attn.v_proj.weight": (8, 16), "model.layers.0.self_attn.o_proj.weight": (16, 16),
             "model.layers.0.mlp.gate_proj.weight": (24, 16), "model.layers.0.mlp.up_proj.weight": (24, 16),
             "model.layers.0.mlp.down_proj.weight": (16, 24)}


def write_hf_folder(folder, config=HF_CONFIG, shapes=HF_SHAPES):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: numpy.full(shape, 0.01, dtype=numpy.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def write_hf_folders(folder):
    write_hf_folder(folder / "hf")
    without = {name: shape for name, shape in HF_SHAPES.items() if "v_proj" not in name}
    write_hf_folder(folder / "hf_missing", shapes=without)
    write_hf_folder(folder / "hf_shape", shapes={**HF_SHAPES, "model.norm.weight": (17,)})
    write_hf_folder(folder / "hf_other", config={**HF_CONFIG, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    weights = write_hf_folder(folder / "hf_cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    weights = write_hf_folder(folder / "hf_header") / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", 40) + weights.read_bytes()[8:])
    (write_hf_folder(folder / "hf_json") / "config.json").write_text('{"hidden_size": 16,')
    (write_hf_folder(folder / "hf_bare") / "model.safetensors").unlink()


def write_tokenizer(path, vocabulary):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = ["the quick brown fox jumps over the lazy dog while federated groups train"] * 4
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert tokenizer.get_vocab_size() == vocabulary
    tokenizer.save(str(path))


def write_data(folder, prepare):
    """`prepare(arguments)` runs `fedshard data prepare`."""
    write_tokenizer(folder / "bpe.json", 300)
    prepare([folder / "train.txt", "-o", folder / "right.tokens"])
    prepare([folder / "train.txt", "-o", folder / "bpe.tokens", "--tokenizer", folder / "bpe.json"])
    right = (folder / "right.tokens").read_bytes()
    (folder / "cut.tokens").write_bytes(right[:-7])
    (folder / "stub.tokens").write_bytes(right[:100])
    (folder / "flipped.tokens").write_bytes(right[:5000] + bytes([right[5000] ^ 1]) + right[5001:])
    (folder / "header.tokens").write_bytes(right[:40] + bytes([right[40] ^ 1]) + right[41:])
    (folder / "foreign.npy").write_bytes(b"\x93NUMPY" + bytes(5000))
    (folder / "empty.tokens").write_bytes(b"")
    (folder / "short.txt").write_text("ten bytes.")
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    (folder / "not_json.json").write_text("{")
