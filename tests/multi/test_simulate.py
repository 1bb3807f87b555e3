"""`fedshard simulate` against the table that the analysis gives for Leonardo, and what it refuses."""

import json
import os
import pathlib
import shlex

import pytest

from multi_harness import BINARY, run_process

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The released runs: bf16 throughout, two sequences of 2,048 tokens a rank.
LLAMA = ["--model", "llama3.1-8b", "--batch", 2, "--seq", 2048, "--every", 8, "--bytes-gather", 2, "--bytes-reduce", 2,
         "--bytes-aggregate", 2, "--machine", "leonardo"]
STRATEGIES = ["fsdp", "hsdp:4", "fl+fsdp:4", "fl+hsdp:32:4"]
SECONDS_AT_512 = {  # of a step, by profile, in the order of STRATEGIES
    "ideal": (1.35, 1.20, 1.07, 1.12),
    "tuned": (1.64, 1.41, 1.12, 1.18),
    "noisy": (2.17, 1.77, 1.16, 1.27),
    "noprefetch": (2.75, 1.77, 1.28, 1.30),
    "checked": (10.24, 1.42, 1.23, 1.27),
}
TOKENS_PER_S = {  # of a rank, by profile, strategy and ranks
    ("tuned", "fsdp"): {32: 3392, 128: 3014, 512: 2494, 1024: 2114, 4096: 1201},
    ("checked", "fsdp"): {32: 2310, 128: 1517, 512: 400, 1024: 202, 4096: 51},
    ("tuned", "fl+fsdp:4"): {32: 3781, 128: 3710, 512: 3661},
    ("checked", "fl+fsdp:4"): {32: 3440, 128: 3380, 512: 3332},
}
TINY = ["--model", "llama-tiny", "--machine", "leonardo", "--ranks", 8]


def simulate(*arguments):
    return run_process([BINARY, "simulate", *map(str, arguments)], dict(os.environ))


def simulated(*arguments):
    done = simulate(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cases_of(result):
    return {(case["profile"], case["strategy"], case["ranks"]): case for case in result["cases"]}


def test_leonardo_at_512_ranks():
    arguments = [*LLAMA, "--ranks", 512, "--profile", "all", "--strategies", ",".join(STRATEGIES)]
    result = simulated(*arguments)
    cases = cases_of(result)
    for profile, row in SECONDS_AT_512.items():
        for strategy, seconds in zip(STRATEGIES, row):
            case = cases[profile, strategy, 512]
            assert case["seconds_per_step"] == pytest.approx(seconds, rel=0.03), (profile, strategy)
            assert sum(case["parts"].values()) == pytest.approx(case["seconds_per_step"], rel=0.01)
        found = [cases[profile, strategy, 512] for strategy in STRATEGIES]
        row = [f"{case['seconds_per_step']:.3f}" for case in found] + [f"{found[2]['ratio']:.2f}"]
        assert f"| {profile} | {' | '.join(row)} |\n" in (ROOT / "docs" / "cost.md").read_text()
    assert cases["checked", "fl+fsdp:4", 512]["ratio"] == pytest.approx(8.33, rel=0.03)
    assert cases["tuned", "fsdp", 512]["ratio"] is None
    # Every constant says what it rests on, in the table too.
    assert [machine["profile"] for machine in result["machines"]] == list(SECONDS_AT_512)
    table = simulate(*arguments).stdout
    for machine in result["machines"]:
        for name, constant in machine["constants"].items():
            assert constant["label"] in ("measured", "published", "derived", "assumed") and constant["source"]
            assert f"\n  {name} " in table and constant["source"] in table


def test_the_example_of_the_docs():
    examples = [line for line in (ROOT / "docs" / "cost.md").read_text().splitlines() if line.startswith("build/")]
    commands = [shlex.split(line)[1:] for line in examples]
    assert [command[0] for command in commands] == ["cost", "simulate"]
    for command in commands:
        done = run_process([BINARY, *command], dict(os.environ))
        assert done.returncode == 0 and done.stderr == "", done.stderr


def test_what_does_not_fit_is_marked():
    """fp32 masters and moments of 8 billion parameters on two ranks, and on 64."""
    arguments = [*LLAMA, "--set", "training.master_dtype=fp32", "--ranks", "2,64", "--strategies", "fsdp"]
    few, many = simulated(*arguments)["cases"]
    assert few["memory_bytes"] > 64e9 > many["memory_bytes"] and (few["fits"], many["fits"]) == (False, True)
    table = simulate(*arguments).stdout
    assert table.count("GiB!") == 1 and "! more than a rank's memory" in table
    assert "!" not in simulate(*arguments, "--constant", "memory_bytes=1e12").stdout


def test_a_sweep():
    ranks = sorted({p for row in TOKENS_PER_S.values() for p in row})
    cases = cases_of(simulated(*LLAMA, "--ranks", ",".join(map(str, ranks)), "--profile", "tuned,checked",
                               "--strategies", "fsdp,fl+fsdp:4"))
    for (profile, strategy), row in TOKENS_PER_S.items():
        for p, tokens in row.items():
            found = cases[profile, strategy, p]["tokens_per_s_and_rank"]
            assert found == pytest.approx(tokens, rel=0.04), (profile, strategy, p)


def test_seeds():
    drawn = [*LLAMA, "--ranks", 64, "--profile", "noisy", "--strategies", "fsdp,fl+fsdp:4", "--rounds", 50]
    mean, once, again, other = (simulated(*drawn, *seed)["cases"]
                                for seed in ([], ["--seed", 1], ["--seed", 1], ["--seed", 2]))
    assert once == again != other
    for with_mean, with_seed in zip(mean, once):
        p5, p50, p95 = (with_seed["drawn"][name] for name in ("p5", "p50", "p95"))
        assert p5 < p50 < p95 and p50 == pytest.approx(with_mean["seconds_per_step"], rel=0.05)


def test_a_slow_group_holds_up_the_others_unless_rounds_are_by_time():
    layout = [*LLAMA, "--ranks", 64, "--profile", "tuned", "--groups", 16]
    alike, slow = (simulated(*layout, *more)["cases"][0] for more in ([], ["--slow", "3:1.5"]))
    assert slow["parts"]["compute"] == pytest.approx(1.5 * alike["parts"]["compute"], rel=1e-6)
    assert slow["seconds_per_step"] > 1.3 * alike["seconds_per_step"] and slow["parts"]["wait"] > 0.3
    by_time = simulated(*layout, "--slow", "3:1.5", "--set", 'federation.every="20s"')["cases"][0]
    assert by_time["steps"][3] < by_time["steps"][0] == by_time["steps"][1]
    assert by_time["tokens_per_s"] > 1.2 * slow["tokens_per_s"]


def test_a_delay_hides_the_exchange():
    layout = [*LLAMA, "--ranks", 64, "--profile", "tuned", "--groups", 16]
    at_once, delayed = (simulated(*layout, *more)["cases"][0] for more in ([], ["--set", "federation.delay=2"]))
    assert at_once["exposed_exchange_s"] == at_once["exchange_s"] == delayed["exchange_s"] > 0
    assert delayed["exposed_exchange_s"] == 0
    in_parts = simulated(*layout, "--set", "federation.fragments=4")["cases"][0]
    assert 1 < in_parts["exchange_s"] / at_once["exchange_s"] < 1.01  # the same bytes, more latencies


def test_sensitivity_and_constants():
    arguments = [*LLAMA, "--ranks", 128, "--profile", "tuned", "--strategies", "fsdp,fl+fsdp:4"]
    result = simulated(*arguments, "--sensitivity")
    rows = {row["constant"]: row for row in result["sensitivity"]}
    assert rows["network_bandwidth"]["halved"][0] > 1.3 * result["cases"][0]["seconds_per_step"]
    assert "call" not in rows  # 0, halved and doubled
    changed = simulated(*arguments, "--constant", "network_bandwidth=6.25e9")
    assert [c["seconds_per_step"] for c in changed["cases"]] == rows["network_bandwidth"]["halved"]
    assert changed["machines"][0]["constants"]["network_bandwidth"]["source"] == "--constant"
    assert "seconds of a step with a constant halved and doubled" in simulate(*arguments, "--sensitivity").stdout


def test_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    case = simulated(*TINY, "--groups", 2, "--shard", 2, "--trace", path)["cases"][0]
    events = json.loads(path.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    spans = [event for event in events if event.get("ph") == "X"]
    lanes = {event["cat"] for event in spans}
    assert {"compute", "shards", "replicas"} <= lanes
    names = {event["name"] for event in spans}
    assert {"gather block 0", "reduce block 0", "backward block 0", "update block 0"} <= names, names
    computing = sum(event["dur"] for event in spans if event["cat"] == "compute")
    assert computing / 1e6 == pytest.approx(case["parts"]["compute"] + case["parts"]["update"], rel=0.05)


@pytest.mark.parametrize("arguments, words", [
    (["--model", "llama-tiny", "--ranks", 4], "--machine is missing: a machine file, or one of dgx-h100, leonardo"),
    (["--machine", "leonardo", "--ranks", 4], "simulate what? Give a config file or --model"),
    ([*TINY[:2], "--machine", "leonard", "--ranks", 4], "--machine leonard: there is no such file"),
    ([*TINY, "--profile", "fast"], "leonardo has no profile 'fast'; it has ideal, tuned, noisy, noprefetch, checked"),
    ([*TINY, "--constant", "speed=1"], "a machine has no constant 'speed'; it has peak_flops"),
    ([*TINY, "--constant", "jitter"], "--constant jitter: write name=value"),
    ([*TINY, "--constant", "jitter=x"], "--constant jitter=x: 'x' is no number"),
    ([*TINY, "--constant", "efficiency=1.5"], "efficiency is from 1e-06 to 1, not 1.5"),
    ([*TINY, "--constant", "jitter=nan"], "jitter is at least 0, not nan"),
    ([*TINY, "--strategies", "ddp"], "--strategies ddp: it is fsdp, hsdp:SHARDS"),
    ([*TINY, "--strategies", "hsdp:x"], "--strategies hsdp:x: 'x' is no number of ranks"),
    ([*TINY, "--strategies", "hsdp:3"], "a group of 8 ranks is no whole number of replicas of 3 shards"),
    ([*TINY, "--strategies", "fl+fsdp:3"], "8 ranks are no whole number of groups of 3"),
    ([*TINY, "--strategies", "fsdp", "--groups", 2], "leave --groups and --shard out"),
    ([*TINY[:4], "--strategies", "fsdp"], "--strategies needs --ranks"),
    ([*TINY[:4]], "--ranks is missing"),
    ([*TINY, "--slow", "1:2"], "--slow 1:2: there are groups 0 to 0"),
    ([*TINY, "--slow", "0"], "--slow 0: write GROUP:FACTOR"),
    ([*TINY, "--slow", "0:-1"], "--slow 0:-1: a factor is above 0"),
    ([*TINY, "--seed", 1, "--rounds", 0], "--rounds counts from 1, not 0"),
    ([*TINY, "--trace", "no/such/folder/t.json"], "no/such/folder/t.json"),
])
def test_wrong_usage_is_refused(arguments, words):
    done = simulate(*arguments)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert words in done.stderr and done.stderr.startswith("fedshard: ") and done.stderr.count("\n") == 1


MACHINE = """name = "mine"
ranks_per_node = 2
[constants]
{constants}
[profiles.fast]
node_bandwidth = 2e9
"""
NEEDED = {"peak_flops": 1e12, "efficiency": 0.5, "memory_bytes": 1e9, "memory_bandwidth": 1e10, "node_bandwidth": 1e9,
          "network_bandwidth": 1e8}
SOURCED = '{name} = {{ value = {value}, label = "measured", source = "by hand" }}'


def machine_file(tmp_path, change=lambda text: text, **constants):
    lines = [SOURCED.format(name=name, value=value) for name, value in {**NEEDED, **constants}.items() if value]
    path = tmp_path / "mine.toml"
    path.write_text(change(MACHINE.format(constants="\n".join(lines))))
    return path


def test_a_machine_file(tmp_path):
    arguments = ["--model", "llama-tiny", "--ranks", 4, "--machine", machine_file(tmp_path)]
    plain, fast = (simulated(*arguments, *more)["machines"][0] for more in ([], ["--profile", "fast"]))
    assert plain["name"] == "mine" and plain["ranks_per_node"] == 2
    assert plain["constants"]["node_bandwidth"] == {"value": 1e9, "label": "measured", "source": "by hand"}
    assert plain["constants"]["jitter"] == {"value": 0, "label": "assumed", "source": "not given"}
    assert fast["constants"]["node_bandwidth"] == {"value": 2e9, "label": "assumed", "source": "profile fast"}


@pytest.mark.parametrize("old, new, words", [
    ('name = "mine"\n', "", "name is missing"),
    ("ranks_per_node = 2", "ranks_per_node = 0", "mine.toml:2: ranks_per_node must be"),
    ("ranks_per_node = 2", "nodes_per_cell = 2", "nodes_per_cell is set, but ranks_per_node is missing"),
    ("ranks_per_node", "ranks_per_rack", "a machine file has no key 'ranks_per_rack'"),
    ("efficiency", "efficency", "a machine has no constant 'efficency'"),
    ('label = "measured"', 'label = "guessed"', "a label is one of measured, published, derived, assumed"),
    (', source = "by hand"', "", "mine.toml:4: peak_flops lacks 'source'"),
    ("value = 0.5", "value = 5", "efficiency is from 1e-06 to 1, not 5"),
    ("[profiles.fast]", "[profiles.fast]\nspeed = 1", "a machine has no constant 'speed'"),
    ("[profiles.fast]", "[software]\nprefetch = -1\n[profiles.fast]", "prefetch must be"),
    ("[constants]", "[constants", "mine.toml:3:"),
    ("[constants]", "[constant]", "a machine file has no key 'constant'"),
    ("{ value = 1000000000.0", "{ worth = 1000000000.0", "memory_bytes has no key 'worth'"),
])
def test_a_wrong_machine_file_is_refused(tmp_path, old, new, words):
    path = machine_file(tmp_path, lambda text: text.replace(old, new, 1))
    done = simulate("--model", "llama-tiny", "--ranks", 4, "--machine", path)
    assert done.returncode == 2 and words in done.stderr and str(path) in done.stderr, done.stderr


def test_a_missing_constant_is_named(tmp_path):
    path = machine_file(tmp_path, network_bandwidth=None, memory_bytes=None)
    done = simulate("--model", "llama-tiny", "--ranks", 4, "--machine", path)
    assert done.returncode == 2 and "lacks memory_bytes, network_bandwidth" in done.stderr
    one_node = machine_file(tmp_path, lambda text: text.replace("ranks_per_node = 2\n", ""), network_bandwidth=None)
    assert simulate("--model", "llama-tiny", "--ranks", 4, "--machine", one_node).returncode == 0
