"""Our inner optimizers and learning rates against torch.optim's.

optim_probe (beside this file) takes parameters and the gradients of all steps, cuts the parameters into shards and runs
our optimizer on each. Weight decay is ours to place: on matrices, not on vectors, so torch gets two parameter groups.
"""

import os
import pathlib
import subprocess

import pytest
import safetensors.torch
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROBE = ROOT / os.environ.get("FEDSHARD_BUILD", "build/release") / "tests" / "optim_probe"

STEPS = 50
SHAPES = {"embedding": (31, 8), "gate": (13, 7), "norm": (8,), "one": (1,), "square": (2, 2), "cube": (3, 2, 5)}


def run_probe(*arguments):
    return subprocess.run([PROBE, *map(str, arguments)], check=True, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout


def make_problem():
    """Parameters, and gradients whose magnitude differs by parameter and that are zero here and there."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        tensors["p." + name] = torch.randn(shape, generator=generator)
        gradients = torch.randn((STEPS, *shape), generator=generator) * 10.0 ** (i // 2 - 2)
        gradients[torch.rand(gradients.shape, generator=generator) < 0.1] = 0
        tensors["g." + name] = gradients
    return tensors


def run_torch(problem, make_optimizer, weight_decay):
    parameters = {name: problem["p." + name].clone().requires_grad_() for name in SHAPES}
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    optimizer = make_optimizer([{"params": matrices, "weight_decay": weight_decay},
                                {"params": vectors, "weight_decay": 0.0}])
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = problem["g." + name][step].clone()
        optimizer.step()
    return {name: parameter.detach().flatten() for name, parameter in parameters.items()}


def compare(problem, tmp_path, name, shards, lr, weight_decay, options, make_optimizer):
    safetensors.torch.save_file(problem, tmp_path / "in.safetensors")
    run_probe(name, tmp_path / "in.safetensors", tmp_path / "out.safetensors", shards, lr, weight_decay, *options)
    ours = safetensors.torch.load_file(tmp_path / "out.safetensors")
    theirs = run_torch(problem, make_optimizer, weight_decay)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        moved = (theirs[key] - problem["p." + key].flatten()).abs().max()
        assert moved > 1e-4, "a parameter that stays where it is shows nothing"
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-6, msg=lambda text: f"{key}: {text}")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("lr, weight_decay, beta1, beta2, eps", [
    (1e-2, 0.1, 0.9, 0.95, 1e-8),
    (1e-2, 0.0, 0.9, 0.999, 1e-8),
    (3e-2, 0.5, 0.8, 0.99, 1e-3),
    (1e-2, 0.1, 0.0, 0.5, 1e-6),
])
def test_adamw(shards, lr, weight_decay, beta1, beta2, eps, tmp_path):
    compare(make_problem(), tmp_path, "adamw", shards, lr, weight_decay, [beta1, beta2, eps],
            lambda groups: torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, foreach=False, fused=False))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("lr, weight_decay, momentum", [
    (1e-2, 0.0, 0.0), (1e-2, 0.1, 0.0), (1e-2, 0.0, 0.9), (3e-3, 0.3, 0.9)])
def test_sgd(shards, lr, weight_decay, momentum, tmp_path):
    compare(make_problem(), tmp_path, "sgd", shards, lr, weight_decay, [momentum],
            lambda groups: torch.optim.SGD(groups, lr=lr, momentum=momentum, foreach=False, fused=False))


def torch_rates(steps, lr, warmup, decay, decay_steps, floor):
    """The warm-up and decay of torch.optim.lr_scheduler, one after the other; torch's cosine would rise again after
    its end, so beyond it the floor is asked for."""
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    decays = {"none": lambda: schedulers.ConstantLR(optimizer, factor=1.0, total_iters=1),
              "linear": lambda: schedulers.LinearLR(optimizer, 1.0, floor, total_iters=decay_steps),
              "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, decay_steps, eta_min=lr * floor)}
    scheduler = decays[decay]()
    if warmup > 0:
        rise = schedulers.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=max(warmup - 1, 1))
        scheduler = schedulers.SequentialLR(optimizer, [rise, scheduler], milestones=[warmup])
    rates = []
    for step in range(steps):
        beyond = decay == "cosine" and step - warmup > decay_steps
        rates.append(lr * floor if beyond else optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
@pytest.mark.parametrize("warmup, decay_steps, floor", [(0, 40, 0.0), (1, 30, 0.1), (10, 30, 0.1), (7, 1, 0.5)])
def test_learning_rates(decay, warmup, decay_steps, floor):
    steps, lr = 60, 0.02
    ours = [float(line) for line in run_probe("rates", steps, lr, warmup, decay, decay_steps, floor).split()]
    assert ours == pytest.approx(torch_rates(steps, lr, warmup, decay, decay_steps, floor), abs=1e-12)
