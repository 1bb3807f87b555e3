"""What is wrong with a command, a configuration, its files or its surroundings is said in one line that names it, with
status 2 or 3, before any rank has started and before there is a run folder."""

import socket
import subprocess

import pytest

import bad_inputs
from fault_runs import DEADLINE_S, ENDLESS, PROGRAM, Run, environment, rank_environment, wait_until


@pytest.fixture(scope="module")
def files(workplace):
    def prepare(arguments):
        subprocess.run([PROGRAM, "data", "prepare", *arguments], check=True, stdout=subprocess.DEVNULL, env=environment())

    bad_inputs.write_data(workplace, prepare)
    bad_inputs.write_hf_folders(workplace)
    return workplace


def refused(run, status, words):
    """The line with which `run` refuses to begin; `words` must be in it."""
    assert run.status() == status, run.errors()
    line = run.error_line()
    for word in words:
        assert word in line, line
    assert run.alive() == {}
    assert not run.folder.exists()
    return line


COMMAND_LINES = {
    "no_command": ([], ["a command is missing", "train", "data"]),
    "unknown_command": (["trian", "run.toml"], ["there is no command 'trian'", "train", "data"]),
    "unknown_flag": (["train", "run.toml", "--rnks", "2"], ["--rnks"]),
    "no_config": (["train"], ["config is required"]),
    "config_missing": (["train", "nowhere.toml"], ["nowhere.toml: cannot open: No such file or directory"]),
    "config_is_a_folder": (["train", "."], [".: is not a regular file"]),
    "no_ranks": (["train", "run.toml", "--ranks", "0"], ["--ranks", "from 1, not '0'"]),
    "ranks_are_no_number": (["train", "run.toml", "--ranks", "two"], ["--ranks", "not 'two'"]),
    "more_ranks_than_a_number_holds": (["train", "run.toml", "--ranks", str(2**31 - 1), "--virtual-groups", "2"],
                                       ["2147483647 processes with a rank of 2 virtual groups each are too many"]),
    "more_ranks_than_memory": (["train", "run.toml", "--ranks", "1000000"], ["1000000 ranks on this machine would"]),
    "bare_override": (["train", "run.toml", "--set", "steps"], ["--set steps", "table.key=value"]),
}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_command_line(workplace, tmp_path, name):
    arguments, words = COMMAND_LINES[name]
    in_place = [workplace / argument if argument == "run.toml" else argument for argument in arguments]
    with Run(tmp_path, *in_place) as run:
        refused(run, 2, words)


# A line of run.toml, what stands there instead, and words of the answer after the number of the last of these lines.
FILES = {
    "unknown_key": ("steps = 3", "stpes = 3", ": [training] has no key 'stpes'; did you mean 'steps'?"),
    "unknown_table": ("[training]", "[trainning]", ": there is no table [trainning]; did you mean [training]?"),
    "twice": ("steps = 3", "steps = 3\nsteps = 4", "'steps'"),
    "no_toml": ("steps = 3", "steps = = 3", "value"),
}


@pytest.mark.parametrize("name", FILES)
def test_config_file(workplace, tmp_path, name):
    right, wrong, words = FILES[name]
    before, _, after = (workplace / "run.toml").read_text().partition(right + "\n")
    assert after
    (tmp_path / "bad.toml").write_text(before + wrong + "\n" + after)
    line = (before + wrong).count("\n") + 1
    with Run(tmp_path, "train", "bad.toml", "--ranks", 2) as run:
        answer = refused(run, 2, [words])
        assert answer.startswith(f"bad.toml:{line}:")


@pytest.mark.parametrize("command", (["--help"], ["train", "{run}", "--dry-run"], ["data", "encode", "{text}"]),
                         ids=lambda command: command[-1].strip("-{}"))
def test_output_to_a_full_disk(files, command):
    filled = [part.format(run=files / "run.toml", text=files / "train.txt") for part in command]
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, *filled], stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == 1
    assert "standard output" in done.stderr or "No space left" in done.stderr, done.stderr


def test_cache_where_nobody_writes(files, tmp_path):
    """A token file needs no preparing, but the mark that it is verified has a place there."""
    env = environment() | {"XDG_CACHE_HOME": "/proc/nowhere"}
    done = subprocess.run([PROGRAM, "train", files / "run.toml", "--set", f"data.train={files / 'right.tokens'}"],
                          stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 1
    assert "XDG_CACHE_HOME" in done.stderr, done.stderr


# (what is set, status, words of the answer); {files} is the folder with the files of bad_inputs.
SETTINGS = {
    "wrong_type": (["training.steps=many"], 2, ["[training] steps", "an integer", '"many"']),
    "no_steps": (["training.steps=0"], 2, ["[training] steps", "at least 1, not 0"]),
    "out_of_range": (["optimizer.beta1=1.5"], 2, ["[optimizer] beta1", "less than 1, not 1.5"]),
    "unknown_choice": (["optimizer.name=adam"], 2, ["[optimizer] name", '"adamw" or "sgd"', '"adam"']),
    "unknown_preset": (["model.preset=llama-huge"], 2, ["'llama-huge'", "llama-tiny", "llama3.1-70b"]),
    "groups_do_not_divide": (["parallelism.groups=3"], 2, ["[parallelism] 5 ranks", "3 equal groups"]),
    "groups_do_not_add_up": (["parallelism.groups=[2, 2]"], 2, ["[parallelism] 5 ranks", "2 and 2", "4"]),
    "shards_do_not_divide": (["parallelism.data_parallel_shard_degree=2"], 2, ["5 ranks", "2 shards"]),
    "data_missing": (["data.train=nowhere.txt"], 2, ["nowhere.txt: no such file"]),
    "glob_without_match": (["data.train={files}/*.parquet"], 2, ["*.parquet", "matches none"]),
    "data_is_a_folder": (["data.train={files}"], 2, ["is a folder"]),
    "data_too_short": (["data.train={files}/short.txt"], 2, ["short", "11 tokens", "seq_len 16 needs 17"]),
    "data_empty": (["data.train={files}/empty.tokens"], 2, ["empty.tokens: is no token file"]),
    "data_foreign": (["data.train={files}/foreign.npy"], 2, ["foreign.npy: is no token file", ".txt and .jsonl"]),
    "data_truncated": (["data.train={files}/cut.tokens"], 3, ["cut.tokens: is truncated", "prepare it again"]),
    "data_stub": (["data.train={files}/stub.tokens"], 3, ["stub.tokens: is truncated", "prepare it again"]),
    "data_flipped": (["data.train={files}/flipped.tokens"], 3, ["flipped.tokens", "damaged", "prepare it again"]),
    "data_header_flipped": (["data.train={files}/header.tokens"], 3, ["header.tokens", "header is damaged"]),
    "data_bad_record": (["data.train={files}/bad.jsonl"], 3, ["bad.jsonl:2:", '"text" is not a string']),
    "data_of_another_tokenizer": (["data.train={files}/bpe.tokens"], 2, ["bpe.tokens: was prepared with tokenizer"]),
    "eval_missing": (["validation.interval=1"], 2, ["[validation] is set, but [data] eval is missing"]),
    "eval_file_missing": (["data.eval=nowhere.txt"], 2, ["nowhere.txt: no such file"]),
    "eval_damaged": (["data.eval={files}/flipped.tokens"], 3, ["flipped.tokens", "damaged"]),
    "tokenizer_missing": (["data.tokenizer=nowhere.json"], 2, ["nowhere.json: cannot open"]),
    "tokenizer_damaged": (["data.tokenizer={files}/not_json.json"], 3, ["not_json.json: is not a sound tokenizer.json"]),
    "tokenizer_too_large": (["data.tokenizer={files}/bpe.json"], 2, ["bpe.json' has 300 ids", "257", "[model] vocab_size"]),
    "vocabulary_too_small": (["model.vocab_size=256"], 2, ["'byte' has 257 ids", "256", "[model] vocab_size"]),
    "sequence_longer_than_data": (["training.seq_len=8191", "model.max_position_embeddings=8191", "data.train={files}/short.txt"],
                                  2, ["11 tokens", "seq_len 8191 needs 8192"]),
    "sequence_longer_than_model": (["training.seq_len=4096"], 2, ["(4096)", "max_position_embeddings (2048)"]),
    "hf_missing": (["model.hf={files}/nowhere"], 2, ["nowhere/config.json: cannot open"]),
    "hf_without_weights": (["model.hf={files}/hf_bare"], 2, ["hf_bare: has neither model.safetensors nor"]),
    "hf_config_is_no_json": (["model.hf={files}/hf_json"], 3, ["hf_json/config.json"]),
    "hf_other_architecture": (["model.hf={files}/hf_other"], 2, ["hf_other/config.json", "gpt2"]),
    "hf_weights_cut": (["model.hf={files}/hf_cut"], 3, ["hf_cut/model.safetensors", "may be cut short"]),
    "hf_header_damaged": (["model.hf={files}/hf_header"], 3, ["hf_header/model.safetensors: the header is no JSON"]),
    "hf_tensor_missing": (["model.hf={files}/hf_missing"], 3, ["hf_missing", "'model.layers.0.self_attn.v_proj.weight'"]),
    "hf_tensor_of_another_shape": (["model.hf={files}/hf_shape"], 3, ["'model.norm.weight'", "[17]", "[16]"]),
    "unknown_interface": (["comm.interface=nosuch0"], 2, ["[comm] interface 'nosuch0'", "lo"]),
    "run_folder_below_a_file": (["metrics.folder={files}/train.txt/run"], 2, ["train.txt/run", "metrics.folder"]),
    "run_folder_where_nobody_writes": (["metrics.folder=/proc/run"], 2, ["/proc/run", "metrics.folder"]),
}


def hf_config(files, folder):
    """run.toml with a Hugging Face folder as its model."""
    text = (files / "run.toml").read_text()
    data = text.index("[data]")
    path = folder / "hf.toml"
    path.write_text("[model]\n" + text[data:])
    return path


@pytest.mark.parametrize("name", SETTINGS)
def test_setting(files, tmp_path, name):
    settings, status, words = SETTINGS[name]
    config = hf_config(files, tmp_path) if name.startswith("hf_") else files / "run.toml"
    with Run(tmp_path, "train", config, "--ranks", 5, settings=[s.format(files=files) for s in settings]) as run:
        refused(run, status, words)


def test_the_same_files_undamaged_are_fine(files, tmp_path):
    settings = (f"model.hf={files / 'hf'}", f"data.train={files / 'right.tokens'}", f"data.eval={files / 'right.tokens'}",
                "validation.interval=1", "comm.interface=lo", "training.steps=1")
    with Run(tmp_path, "train", hf_config(files, tmp_path), "--ranks", 2, settings=settings) as run:
        assert run.status() == 0, run.errors()
        assert run.errors() == ""


def test_a_folder_that_holds_a_run_is_left_alone(workplace, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    before = {"metrics.jsonl": '{"kind":"start"}\n', "config.toml": "# mine\n"}
    for name, text in before.items():
        (folder / name).write_text(text)
    with Run(tmp_path, "train", workplace / "run.toml", "--ranks", 2) as run:
        assert run.status() == 2
        line = run.error_line()
        assert str(folder) in line and "holds a run already" in line and "metrics.folder" in line
        assert run.alive() == {}
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_a_folder_where_another_run_begins_is_refused(workplace, tmp_path):
    """Before the first record, when nothing but a lock tells of the other run."""
    settings = [f"training.steps={ENDLESS}"]
    with Run(tmp_path, "train", workplace / "run.toml", "--ranks", 2, settings=settings) as first:
        wait_until((first.folder / "config.toml").exists, DEADLINE_S, "the first run makes its folder")
        with Run(tmp_path, "train", workplace / "run.toml", "--ranks", 2) as second:
            assert second.status() == 2
            line = second.error_line()
            assert str(first.folder) in line and ("another run has just begun" in line or "holds a run already" in line)
            assert "metrics.folder" in line and second.alive() == {}
        first.wait_for("step", 2)


@pytest.fixture
def busy_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_busy_port(workplace, tmp_path, busy_port):
    words = [f"port {busy_port} of 127.0.0.1 is in use", "MASTER_PORT"]
    with Run(tmp_path, "train", workplace / "run.toml", "--ranks", 2, env=environment(MASTER_PORT=busy_port)) as run:
        refused(run, 2, words)
    with Run(tmp_path, "train", workplace / "run.toml", env=rank_environment(0, 2, busy_port)) as run:
        refused(run, 2, words)


def test_a_port_where_something_else_listens(workplace, tmp_path, busy_port):
    with Run(tmp_path, "train", workplace / "run.toml", env=rank_environment(1, 2, busy_port),
             settings=["comm.timeout_s=2"]) as run:
        refused(run, 4, ["rank 1", f"no store answers at 127.0.0.1:{busy_port}", "MASTER_ADDR", "MASTER_PORT"])


ENVIRONMENTS = {
    "rank_alone": ({"RANK": 0}, ["RANK is set but WORLD_SIZE is not"]),
    "world_alone": ({"WORLD_SIZE": 2}, ["WORLD_SIZE is set but RANK is not"]),
    "no_local_rank": ({"RANK": 0, "WORLD_SIZE": 2}, ["RANK is set but LOCAL_RANK is not"]),
    "no_address": ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, ["RANK is set but MASTER_ADDR is not"]),
    "no_number": ({"RANK": "first", "WORLD_SIZE": 2, "LOCAL_RANK": 0}, ["RANK is 'first'"]),
    "rank_beyond_world": (rank_environment(2, 2, 1), ["rank 2 of a world of 2"]),
    "no_port": ({"MASTER_PORT": "12x"}, ["MASTER_PORT is '12x'"]),
    "large_port": (rank_environment(0, 2, 70000), ["MASTER_PORT is 70000"]),
    "half_a_launcher_of_ours": ({**rank_environment(0, 2, 1), "FEDSHARD_COORDINATOR": "tcp://x"},
                                ["FEDSHARD_RUN_TOKEN", "only FEDSHARD_COORDINATOR"]),
    "unknown_address": ({**rank_environment(0, 1, 1), "MASTER_ADDR": "nowhere.invalid"}, ["'nowhere.invalid'"]),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment(workplace, tmp_path, name):
    variables, words = ENVIRONMENTS[name]
    with Run(tmp_path, "train", workplace / "run.toml", env=environment(**variables)) as run:
        refused(run, 2, words)
