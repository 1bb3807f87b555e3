"""Our inner optimizers and learning rates against torch.optim's.

optim_probe (beside this file) takes parameters and the gradients of all steps, cuts the units into shards and runs our
optimizer on each. Weight decay is ours to place: on matrices, not on vectors, so torch gets a parameter group for each.
"""

import fnmatch
import math
import os
import pathlib
import subprocess

import pytest
import safetensors.torch
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROBE = ROOT / os.environ.get("FEDSHARD_BUILD", "build/release") / "tests" / "optim_probe"

STEPS = 50
# By unit; Muon is meant for the matrices of those between the first and the last.
SHAPES = {"a/embedding": (31, 8), "a/gain": (1,), "b/gate": (13, 7), "b/norm": (8,), "b/wide": (5, 64),
          "b/square": (2, 2), "c/cube": (3, 2, 5), "c/tall": (50, 3), "c/one": (1, 1), "d/head": (9, 4), "d/norm": (11,)}
MUON = {"b/gate", "b/wide", "b/square", "c/tall", "c/one"}
# (pattern, part of the learning rate, weight decay), the first that matches counts.
GROUPS = [("b/*", 0.5, None), ("[ac]/*", 2.0, 0.25), ("d/norm", 1.0, 0.125)]


def run_probe(*arguments):
    return subprocess.run([PROBE, *map(str, arguments)], check=True, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout


def make_problem():
    """Parameters, and gradients whose magnitude differs by parameter and that are zero here and there."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        tensors["p." + name] = torch.randn(shape, generator=generator)
        gradients = torch.randn((STEPS, *shape), generator=generator) * 10.0 ** (i % 4 - 2)
        gradients[torch.rand(gradients.shape, generator=generator) < 0.1] = 0
        tensors["g." + name] = gradients
    return tensors


def torch_groups(parameters, lr, weight_decay, groups):
    """One torch parameter group a parameter, by name."""
    rules = {}
    for name, parameter in parameters.items():
        factor, decay = 1.0, weight_decay if parameter.dim() >= 2 else 0.0
        for pattern, lr_factor, group_decay in groups:
            if fnmatch.fnmatchcase(name, pattern):
                factor, decay = lr_factor, decay if group_decay is None else group_decay
                break
        rules[name] = {"params": [parameter], "lr": lr * factor, "weight_decay": decay}
    return rules


def run_torch(problem, make_optimizers, lr, weight_decay, groups):
    parameters = {name: problem["p." + name].clone().requires_grad_() for name in SHAPES}
    optimizers = make_optimizers(torch_groups(parameters, lr, weight_decay, groups))
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = problem["g." + name][step].clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach().flatten() for name, parameter in parameters.items()}


def run_ours(problem, tmp_path, options, groups):
    safetensors.torch.save_file(problem, tmp_path / "in.safetensors")
    texts = [f"group={pattern},{factor},{'' if decay is None else decay}" for pattern, factor, decay in groups]
    run_probe("run", tmp_path / "in.safetensors", tmp_path / "out.safetensors",
              *[f"{key}={value}" for key, value in options.items()], *texts)
    return safetensors.torch.load_file(tmp_path / "out.safetensors")


def compare(tmp_path, options, make_optimizers, groups):
    """`options` are the probe's; torch sees the learning rate and weight decay through its parameter groups."""
    problem = make_problem()
    ours = run_ours(problem, tmp_path, options, groups)
    torch.set_num_threads(1)
    theirs = run_torch(problem, make_optimizers, options["lr"], options["weight_decay"], groups)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        moved = (theirs[key] - problem["p." + key].flatten()).abs().max()
        assert moved > 1e-4, "a parameter that stays where it is shows nothing"
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-6, msg=lambda text: f"{key}: {text}")


# Shards, the step after which all state goes through the registry into a new optimizer, groups.
WAYS = [(1, 0, []), (3, 0, []), (3, 20, []), (2, 31, GROUPS)]
over_ways = pytest.mark.parametrize("shards, resume_at, groups", WAYS,
                                    ids=["whole", "sharded", "resumed", "groups, resumed"])


def adamw(rules, options):
    return torch.optim.AdamW(rules, betas=(options["beta1"], options["beta2"]), eps=options["eps"], foreach=False,
                             fused=False)


@over_ways
@pytest.mark.parametrize("lr, weight_decay, beta1, beta2, eps", [
    (1e-2, 0.1, 0.9, 0.95, 1e-8),
    (1e-2, 0.0, 0.9, 0.999, 1e-8),
    (3e-2, 0.5, 0.8, 0.99, 1e-3),
    (1e-2, 0.1, 0.0, 0.5, 1e-6),
])
def test_adamw(shards, resume_at, groups, lr, weight_decay, beta1, beta2, eps, tmp_path):
    options = {"update": "adamw", "shards": shards, "resume_at": resume_at, "lr": lr, "weight_decay": weight_decay,
               "beta1": beta1, "beta2": beta2, "eps": eps}
    compare(tmp_path, options, lambda rules: [adamw(list(rules.values()), options)], groups)


@over_ways
@pytest.mark.parametrize("lr, weight_decay, momentum, nesterov", [
    (1e-2, 0.0, 0.0, False), (1e-2, 0.1, 0.0, False), (1e-2, 0.0, 0.9, False), (3e-3, 0.3, 0.9, False),
    (1e-2, 0.0, 0.9, True), (3e-3, 0.3, 0.5, True)])
def test_sgd(shards, resume_at, groups, lr, weight_decay, momentum, nesterov, tmp_path):
    options = {"update": "sgd_momentum" if momentum else "sgd", "shards": shards, "resume_at": resume_at, "lr": lr,
               "weight_decay": weight_decay, "momentum": momentum, "nesterov": int(nesterov)}
    compare(tmp_path, options, lambda rules: [torch.optim.SGD(
        list(rules.values()), momentum=momentum, nesterov=nesterov, foreach=False, fused=False)], groups)


@over_ways
@pytest.mark.parametrize("lr, weight_decay, momentum, nesterov", [
    (1e-2, 0.1, 0.95, True), (1e-2, 0.0, 0.95, False), (3e-3, 0.5, 0.0, True)])
def test_muon(shards, resume_at, groups, lr, weight_decay, momentum, nesterov, tmp_path):
    options = {"update": "muon", "shards": shards, "resume_at": resume_at, "lr": lr, "weight_decay": weight_decay,
               "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "momentum": momentum, "nesterov": int(nesterov)}

    def make_optimizers(rules):
        muon = torch.optim.Muon([rules[name] for name in MUON], momentum=momentum, nesterov=nesterov,
                                adjust_lr_fn="match_rms_adamw")
        return [muon, adamw([rule for name, rule in rules.items() if name not in MUON], options)]

    compare(tmp_path, options, make_optimizers, groups)


def choices(update):
    """One set of options for an update, and what makes torch's optimizers of them."""
    options = {"update": update, "lr": 1e-2, "weight_decay": 0.1}
    if update == "sgd_momentum":
        options.update(momentum=0.9, nesterov=1)
        return options, lambda rules: [torch.optim.SGD(list(rules.values()), momentum=0.9, nesterov=True, foreach=False,
                                                       fused=False)]
    options.update(beta1=0.9, beta2=0.95, eps=1e-8)
    if update == "adamw":
        return options, lambda rules: [adamw(list(rules.values()), options)]
    options.update(momentum=0.95, nesterov=1)
    return options, lambda rules: [
        torch.optim.Muon([rules[name] for name in MUON], momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"),
        adamw([rule for name, rule in rules.items() if name not in MUON], options)]


UPDATES = ["adamw", "sgd_momentum", "muon"]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("shards", [1, 3])
def test_bf16_masters_are_updated_in_fp32_and_rounded_once(update, shards, tmp_path):
    """torch in fp32, its parameters rounded to bf16 after each step, its moments left alone. Where ours and torch's fp32
    differ by a rounding, now and then one of them falls to the other side of a tie: hardly ever, and by an ulp or two."""
    options, make_optimizers = choices(update)
    problem = make_problem()
    ours = run_ours(problem, tmp_path, {**options, "shards": shards, "master": "bf16"}, [])
    rounded = {key: value.bfloat16().float() if key.startswith("p.") else value for key, value in problem.items()}
    torch.set_num_threads(1)

    def rounding(rules):
        optimizers = make_optimizers(rules)
        parameters = [rule["params"][0] for rule in rules.values()]

        class Round:
            def step(self):
                for parameter in parameters:
                    parameter.data = parameter.data.bfloat16().float()

        return [*optimizers, Round()]

    theirs = run_torch(rounded, rounding, options["lr"], options["weight_decay"], [])
    equal = total = 0
    for key, value in theirs.items():
        assert torch.equal(ours[key], ours[key].bfloat16().float())
        assert (value - rounded["p." + key].flatten()).abs().max() > 1e-3
        torch.testing.assert_close(ours[key], value, rtol=2**-6, atol=1e-4, msg=lambda text: f"{key}: {text}")
        equal, total = equal + (ours[key] == value).sum().item(), total + value.numel()
    assert equal / total > 0.97


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_offloading_changes_no_bit(update, master, tmp_path):
    options, _ = choices(update)
    problem = make_problem()
    kept, offloaded = (run_ours(problem, tmp_path, {**options, "shards": 3, "master": master, "offload": offload}, [])
                       for offload in (0, 1))
    assert all(torch.equal(kept[key], offloaded[key]) for key in kept)


def torch_rates(steps, lr, warmup, stable, decay, decay_steps, floor):
    """The phases of torch.optim.lr_scheduler, one after the other; torch's cosine would rise again after its end, so
    beyond it the floor is asked for."""
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    decays = {"none": lambda: schedulers.ConstantLR(optimizer, factor=1.0, total_iters=1),
              "linear": lambda: schedulers.LinearLR(optimizer, 1.0, floor, total_iters=decay_steps),
              "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, decay_steps, eta_min=lr * floor)}
    phases, milestones = [], []
    if warmup > 0:
        phases.append(schedulers.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=max(warmup - 1, 1)))
        milestones.append(warmup)
    if stable > 0:
        phases.append(schedulers.ConstantLR(optimizer, factor=1.0, total_iters=1))
        milestones.append(warmup + stable)
    phases.append(decays[decay]())
    scheduler = schedulers.SequentialLR(optimizer, phases, milestones) if milestones else phases[0]
    rates = []
    for step in range(steps):
        beyond = decay == "cosine" and step - warmup - stable > decay_steps
        rates.append(lr * floor if beyond else optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def our_rates(steps, lr, warmup, stable, decay, decay_steps, floor):
    return [float(line) for line in run_probe("rates", steps, lr, warmup, stable, decay, decay_steps, floor).split()]


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
@pytest.mark.parametrize("warmup, stable, decay_steps, floor", [
    (0, 0, 40, 0.0), (1, 0, 30, 0.1), (10, 0, 30, 0.1), (7, 0, 1, 0.5),
    (0, 13, 20, 0.0), (5, 1, 30, 0.1), (10, 20, 30, 0.1), (7, 40, 1, 0.5)])
def test_learning_rates(decay, warmup, stable, decay_steps, floor):
    arguments = (60, 0.02, warmup, stable, decay, decay_steps, floor)
    assert our_rates(*arguments) == pytest.approx(torch_rates(*arguments), abs=1e-12)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_warm_up_stable_decay_is_torchtitans(decay):
    """The full rate until the last decay_steps steps, as a factor for torch.optim.lr_scheduler.LambdaLR."""
    steps, lr, warmup, decay_steps, floor = 60, 0.02, 10, 20, 0.1

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        if step < steps - decay_steps:
            return 1.0
        progress = (step - (steps - decay_steps)) / decay_steps
        left = 1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (1 - floor) * left

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    stable = steps - warmup - decay_steps
    assert our_rates(steps, lr, warmup, stable, decay, decay_steps, floor) == pytest.approx(theirs, abs=1e-12)
