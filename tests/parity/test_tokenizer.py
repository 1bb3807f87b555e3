"""Our byte-level BPE against the `tokenizers` package, id for id.

Small vocabularies are trained here with the pre-tokenizers of well-known models, then random and nasty strings are
encoded by the package and by `fedshard data encode`.
"""

import json
import os
import pathlib
import pydoc_data.topics
import random
import subprocess

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
FEDSHARD = ROOT / os.environ.get("FEDSHARD_BUILD", "build/release") / "fedshard"
STRINGS = 50_000 if os.environ.get("FEDSHARD_TEST_SCALE") == "long" else 6_000

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# Of DeepSeek's kind: punctuation and symbols by category, ranges written out.
CATEGORIES = r"[!-/:-~]\p{Lu}+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|[一-龥぀-ゟ゠-ヿ]+|\d|\S"


def byte_level(prefix=False, regex=True):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def split_by(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level(regex=False)])


PRE_TOKENIZERS = {
    "gpt2": byte_level(),
    "llama3": split_by(LLAMA3),
    "smollm2": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
    "gpt4o": split_by(GPT4O),
    "categories": split_by(CATEGORIES),
    "digits_and_prefix": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), byte_level(prefix=True)]),
    "literal_split": pre_tokenizers.Sequence([pre_tokenizers.Split("a.b ", "isolated"), byte_level()]),
    "no_split": byte_level(regex=False),
}

NASTY = [
    "", " ", "\n", "\0", "a", "\0\0a\0", "DON'T I'LL We'Ve they'RE 'S 'ſ x'K", "don't i'll we've they're it's I'm he'd",
    "1 12 123 1234 12345678901234567890 1,234.5", "\r\n\r\n \r\n", "a\r\nb\rc\n\n\nd", "a\u2029b\u2028c\x85d", "  a   b \t c\t\td ",
    "e\u0301a\u0308\u0304 \u0301", "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽", "中文字符，日本語テキスト、한국어", "العربية עברית हिन्दी ไทย", "\ufeffBOM \u180e mongolian\u180e",
    "a\u00a0b\u3000c\u200bd\u200d", "x" * 20_000, " " * 20_000, " " * 5_000 + "x", "\n" * 5_000, "7" * 5_000, "é" * 5_000, "ab" * 10_000,
    "!" * 3_000 + "\r\n", "²³¼Ⅷ①٣৪", "ǅ ǈ ʰ ª º ß ẞ ŉ ﬁ İı", "<|endoftext|>", "a<|endoftext|>b<|endoftext|><|endoftext|>", "<|endoftext|",
    "<|a|><|b|> <|a|> <|a|><|c|>", "<|end<|endoftext|>oftext|>", "newwordnewword", "__new__ x__new____new__", "\U00031350\U0001E4D0\u1c89",
    "a.b a.b a.b",
]
FRAGMENTS = [
    "the", " the", "The ", "'s", "'S", "'ll", "'LL", "'Ve", " ", "  ", "\n", "\r\n", "\t", "\u2029", "\u00a0", "\u3000", "\u180e", "\0", "1", "23", "٣", "²",
    "é", "e\u0301", "ñ", "ß", "ſ", "中", "日本", "カ", "한", "ไ", "👍", "🏽", "\u200d", "\ufe0f", "!", "...", "—", "_", "\\", "\"", "$", "€", "Aa", "zZ", "ǅ", "ʰ",
    "<|endoftext|>", "<|a|>", "<|b|>", "newword", "newwordnew", "a.b ", "\u0308", "\U0001d7d8", "\U00020000", "\U00031350", "\U0001E4D0", "\u1c8a",
]


def random_strings(count):
    rng = random.Random(20)
    alphabets = [range(0x20, 0x7F), range(0x0, 0x250), range(0x0, 0x3000), range(0x3000, 0xD800), range(0xE000, 0x1_0000),
                 range(0x1_0000, 0x3_2000), range(0xE_0000, 0xE_0200), range(0, 0x21)]
    for _ in range(count):
        kind = rng.random()
        if kind < 0.5:
            yield "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 30)))
        elif kind < 0.9:
            yield "".join(chr(rng.choice(rng.choice(alphabets))) for _ in range(rng.randint(1, 40)))
        else:
            yield "".join(rng.choice(FRAGMENTS) * rng.randint(1, 40) for _ in range(rng.randint(1, 8)))


@pytest.fixture(scope="module")
def text():
    english = "\n\n".join(pydoc_data.topics.topics.values())
    return [english, *NASTY, *random_strings(2_000)]


@pytest.fixture(scope="module")
def strings():
    return NASTY + list(random_strings(STRINGS))


def train(name, text, folder, *, added=(), change=None):
    """A tokenizer.json of about 1,500 tokens, read back by the package; `change` edits the JSON before."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1_500, show_progress=False, special_tokens=["<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens(list(added))
    definition = json.loads(tokenizer.to_str())
    if change:
        change(definition)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(definition), encoding="utf-8")
    return path, Tokenizer.from_file(str(path))


def encode_ours(tokenizer, strings, folder):
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": s}, ensure_ascii=False) + "\n" for s in strings), encoding="utf-8", newline="")
    command = [FEDSHARD, "data", "encode", "--tokenizer", tokenizer, "--jsonl", documents]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return [[int(i) for i in line.split()] for line in result.stdout.split("\n")[:-1]]


def assert_equal(path, reference, strings, folder):
    ours = encode_ours(path, strings, folder)
    assert len(ours) == len(strings)
    for string, got, encoding in zip(strings, ours, reference.encode_batch(strings, add_special_tokens=False)):
        assert got == encoding.ids, ascii(string[:200])


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_ids_are_equal(name, text, strings, tmp_path):
    if name == "no_split":  # every text is one piece: training on long ones takes minutes
        text = NASTY[:20] + FRAGMENTS
    path, reference = train(name, text, tmp_path)
    assert_equal(path, reference, strings, tmp_path)


def test_ignore_merges_takes_whole_pieces(text, strings, tmp_path):
    words = ["qwertyuiop", "Ġqwertyuiop", "ĠqwertyuiopĠqwertyuiop"]  # the last is never a piece of its own

    def change(definition):
        definition["model"]["ignore_merges"] = True
        for word in words:
            assert word not in definition["model"]["vocab"]
            definition["model"]["vocab"][word] = len(definition["model"]["vocab"])

    path, reference = train("llama3", text, tmp_path, change=change)
    assert len(reference.encode(" qwertyuiop").ids) == 1
    more = ["qwertyuiop qwertyuiops", "qwertyuiop", " qwertyuiop qwertyuiop", "Qwertyuiop\nqwertyuiop's"]
    assert_equal(path, reference, strings + more, tmp_path)


def test_added_tokens_are_cut_out(text, strings, tmp_path):
    added = [AddedToken("<|a|>", special=True, normalized=False), AddedToken("<|a|><|b|>", special=True, normalized=False),
             AddedToken("newword", normalized=True), AddedToken("newwordnew", normalized=True), AddedToken("__new__", normalized=False),
             AddedToken("é", normalized=True), AddedToken("   ", normalized=False)]
    for name in ("llama3", "digits_and_prefix"):
        path, reference = train(name, text, tmp_path, added=added)
        assert_equal(path, reference, strings, tmp_path)


def test_merges_as_strings_and_without_a_type(text, strings, tmp_path):
    def change(definition):
        model = definition["model"]
        del model["type"]
        model["merges"] = ["#version: 0.2"] + [" ".join(pair) for pair in model["merges"]]

    path, reference = train("gpt2", text, tmp_path, change=change)
    assert_equal(path, reference, strings, tmp_path)


def character_of(byte):
    """How tokenizer files write a byte from 0x80 on."""
    return chr(byte) if byte >= 0xA1 and byte != 0xAD else chr(0x122 + byte - 0x80 if byte < 0xA1 else 0x143)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_code_point_is_in_the_same_class(name, tmp_path):
    """Each code point stands beside a capital, a small letter, digits, blanks, punctuation and itself. The only merges join
    those with its first or last byte, so every boundary between two pieces shows in the ids."""
    alphabet = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), range(256)))
    first, last = ([character_of(byte) for byte in bytes] for bytes in (range(0xC2, 0xF5), range(0x80, 0xC0)))
    merges = [(a, b) for a in "A7!Ġ" for b in first] + [(a, b) for a in last for b in "b7!Ġ"] + [(a, b) for a in last for b in first]
    vocabulary = {**alphabet, "<|endoftext|>": 256, **{a + b: 257 + i for i, (a, b) in enumerate(merges)}}
    reference = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    reference.pre_tokenizer = PRE_TOKENIZERS[name]
    path = tmp_path / "tokenizer.json"
    reference.save(str(path))
    points = [c for c in [*range(0x80, 0x33480), *range(0xE0000, 0xE0200), 0xF0000, 0x10FFFF] if not 0xD800 <= c < 0xE000]
    strings = ["".join(f"A{c}b7{c}{c}7 {c}!{c} " for c in map(chr, points[i:i + 50])) for i in range(0, len(points), 50)]
    assert_equal(path, reference, strings, tmp_path)
