"""The order in which real ranks worked: what the schedule's checker proves about the plan holds for the trace."""

import json

import pytest

STEPS = 3
UNITS = ["embedding", "block 0", "block 1", "head"]
COMPUTATIONS = [("forward", u) for u in UNITS] + [("backward", u) for u in reversed(UNITS)]


def operations(path):
    """[(micro-step, kind, unit)] of the training steps, in the order in which the rank began them."""
    events = sorted((e for e in json.loads(path.read_text()) if e["ph"] == "X"), key=lambda e: e["ts"])
    found, steps = [], 0
    for event in events:
        words = event["name"].split(" ", 2)
        if words[0] == "step":
            found.append((None, "step", event["name"][len("step "):]))
            steps += 1
            if steps == STEPS * len(UNITS):
                return found
        else:
            found.append((int(words[0][1:]), words[1], words[2]))
    raise AssertionError(f"{steps} optimizer steps in the trace")


def reads_parameters(computation):
    return computation != ("backward", "embedding")


@pytest.mark.parametrize("parallelism", [{}, {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}],
                         ids=["fsdp 4", "hsdp 2x2"])
def test_the_trace_shows_the_proven_order(program, parallelism):
    run = program.train(4, training={"steps": STEPS, "local_batch_size": 1, "gradient_accumulation_steps": 2},
                        parallelism=parallelism, lr_scheduler={"warmup_steps": 0}, metrics={"trace": True})
    traces = sorted((run.folder / "ranks").glob("*.trace.json"))
    assert len(traces) == 4
    orders = [operations(trace) for trace in traces]
    assert all(order == orders[0] for order in orders), "ranks worked in different orders"
    computed = [(kind, unit) for _, kind, unit in orders[0] if kind in ("forward", "backward")]
    assert computed == COMPUTATIONS * 2 * STEPS

    gathered = set()
    ahead = iter(computed[1:])
    for micro_step, kind, unit in orders[0]:
        if kind == "gather":
            assert unit not in gathered
            gathered.add(unit)
            assert len(gathered) <= 2, gathered
        elif kind == "release":
            gathered.remove(unit)
        elif kind in ("forward", "backward"):
            assert unit in gathered or not reads_parameters((kind, unit))
            following = next(ahead, None)
            last_of_step = (micro_step, kind, unit) == (1, "backward", "embedding")
            if following and reads_parameters(following) and not last_of_step:
                assert following[1] in gathered, f"{following} is not being gathered while {kind} {unit} computes"
    assert not gathered
