"""The same training in one process of plain PyTorch: transformers' Llama, torch.optim, torch's clipping and schedules.

Nothing here knows about shards, replicas or messages. With several groups the groups are trained in turn, each a model
with an optimizer of its own, and every K steps their parameters become the weighted mean. In a warm-up before that each
of them is given the gradient of all sequences.
"""

import copy
import dataclasses
import fnmatch
import math

import numpy
import torch
import transformers

from multi_harness import data_order, read_tokens, windows

torch.set_num_threads(1)


@dataclasses.dataclass
class Recipe:
    """What to train, in the words of the configuration. `batch` is the sequences of one step over all groups."""
    weights: object
    train: object
    eval: object
    seed: int
    steps: int
    batch: int
    groups: int = 1
    shares: tuple = ()            # sequences of a step by group; empty: as many for each
    every: object = 0             # steps between averages; 0: never; a list: by group
    averaging: tuple = ()         # one weight a group; empty: the same for all
    group_local: tuple = ()       # patterns of parameters that are left out of the mean
    ranks: tuple = ()             # by group; each evaluates its ranks' part. Empty: one group, as all have one model
    start_step: int = 0           # steps of the warm-up; averages are counted from there
    prox_mu: float = 0.0          # of FedProx's term
    nesterov: tuple = ()          # (lr, momentum) of an outer SGD over the pseudo-gradient; empty: the mean itself
    delay: int = 0                # steps from a capture of the groups' parameters to the use of their mean
    mix: float = 0.0              # what a group keeps of its own parameters there
    fragments: int = 1            # parts of the model that are averaged apart
    average_moments: bool = False  # of AdamW too, where the parameters are
    optimizer: str = "adamw"
    lr: float = 0.003
    weight_decay: float = 0.1
    momentum: float = 0.0
    max_norm: float = 0.0         # 0: no clipping
    warmup_steps: int = 0
    min_lr_factor: float = 0.0


@dataclasses.dataclass
class Outcome:
    losses: list                  # [group][step]
    norms: list                   # [group][step], before clipping
    lrs: list                     # [step]
    eval_loss: float              # of the groups' weighted mean, and of what is each group's own
    eval_tokens: int


def make_optimizer(recipe, model):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), eps=1e-8)


def make_schedule(recipe, optimizer):
    """Torch's own pieces: linear from lr / warmup to lr, then the cosine from lr down over the steps that are left."""
    schedule = torch.optim.lr_scheduler
    rest = recipe.steps - recipe.warmup_steps
    fall = schedule.CosineAnnealingLR(optimizer, T_max=rest, eta_min=recipe.lr * recipe.min_lr_factor)
    if recipe.warmup_steps == 0:
        return fall
    rise = schedule.LinearLR(optimizer, start_factor=1 / recipe.warmup_steps, total_iters=recipe.warmup_steps - 1)
    return schedule.SequentialLR(optimizer, [rise, fall], milestones=[recipe.warmup_steps])


def loss_of(model, sequences, reduction="mean"):
    logits = model(input_ids=sequences[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten(), reduction=reduction)


class Group:
    """One model and what trains it."""

    def __init__(self, recipe, model):
        self.recipe = recipe
        self.model = model
        self.optimizer = make_optimizer(recipe, model)
        self.schedule = make_schedule(recipe, self.optimizer)
        self.losses, self.norms, self.lrs = [], [], []

    def set_anchor(self):
        self.anchor = [p.detach().clone() for p in self.model.parameters()]

    def backward(self, sequences):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, sequences)
        loss.backward()
        self.losses.append(loss.item())

    def add_proximal_term(self):
        for parameter, anchor in zip(self.model.parameters(), self.anchor):
            parameter.grad.add_(parameter.detach() - anchor, alpha=self.recipe.prox_mu)

    def update(self):
        limit = self.recipe.max_norm if self.recipe.max_norm > 0 else math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.lrs.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.schedule.step()
        self.norms.append(norm.item())

    def step(self, sequences):
        self.backward(sequences)
        if self.recipe.prox_mu > 0:
            self.add_proximal_term()
        self.update()


def step_together(groups, batches):
    """Each group is updated by the mean gradient of all sequences."""
    sequences = sum(len(batch) for batch in batches)
    for group, batch in zip(groups, batches):
        group.backward(batch)
    for same in zip(*(group.model.parameters() for group in groups)):
        gradient = sum(p.grad.double() * (len(batch) / sequences) for p, batch in zip(same, batches)).float()
        for parameter in same:
            parameter.grad.copy_(gradient)
    for group in groups:
        group.update()


@torch.no_grad()
def mean_of(groups, averaging, group_local=()):
    """Parameter by parameter: the weighted sum in group order in fp64, rounded to fp32 once; None of group-local ones."""
    means = []
    for name, *parameters in zip(dict(groups[0].model.named_parameters()),
                                 *(group.model.parameters() for group in groups)):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group_local):
            means.append(None)
            continue
        total = torch.zeros_like(parameters[0], dtype=torch.float64)
        for weight, parameter in zip(averaging, parameters):
            total += weight * parameter.double()
        means.append(total.float())
    return means


@torch.no_grad()
def assign(model, values):
    for parameter, value in zip(model.parameters(), values):
        if value is not None:
            parameter.copy_(value)


@torch.no_grad()
def evaluate(recipe, models):
    """Mean loss and tokens. The sequences are dealt to all ranks in contiguous parts, whose sizes differ by 1 at most."""
    held_out = torch.from_numpy(windows(read_tokens(recipe.eval)))
    owners = [group for group, ranks in enumerate(recipe.ranks or [1]) for _ in range(ranks)]
    parts = numpy.array_split(numpy.arange(len(held_out)), len(owners))
    total = sum(loss_of(models[group].eval(), held_out[part], reduction="sum").item()
                for group, part in zip(owners, parts))
    tokens = held_out[:, 1:].numel()
    return total / tokens, tokens


def fragment_of(name, recipe, layers):
    """Which fragment a parameter is in: embedding, blocks, and norm with head, dealt in turn."""
    parts = name.split(".")
    unit = 0 if "embed_tokens" in name else 1 + int(parts[2]) if "layers" in name else 1 + layers
    return unit % recipe.fragments


class Rounds:
    """The averages over the groups, fragment by fragment."""

    def __init__(self, recipe, groups, averaging):
        self.recipe, self.groups, self.averaging = recipe, groups, averaging
        self.anchor = copy.deepcopy(groups[0].model)
        names = [name for name, _ in self.anchor.named_parameters()]
        layers = self.anchor.config.num_hidden_layers
        self.of_fragment = [[n for n, name in enumerate(names) if fragment_of(name, recipe, layers) == f]
                            for f in range(recipe.fragments)]
        self.outers = [make_outer(recipe, [list(self.anchor.parameters())[n] for n in members])
                       for members in self.of_fragment]
        self.under_way = None  # fragment, step of the capture, the mean of all parameters then

    def after_step(self, step):
        if self.under_way and step == self.under_way[1] + self.recipe.delay:
            self.apply()
        for fragment in range(self.recipe.fragments):
            begin = math.ceil((fragment + 1) * self.recipe.every / self.recipe.fragments)
            if (step - begin) % self.recipe.every == 0 and step >= begin:
                self.capture(fragment, step)
                if self.recipe.delay == 0:
                    self.apply()

    def capture(self, fragment, step):
        self.under_way = fragment, step, mean_of(self.groups, self.averaging, self.recipe.group_local)

    def average(self):
        self.capture(0, 0)
        self.apply()

    @torch.no_grad()
    def average_moments(self):
        for parameters in zip(*(group.model.parameters() for group in self.groups)):
            states = [group.optimizer.state[p] for group, p in zip(self.groups, parameters)]
            for moment in ("exp_avg", "exp_avg_sq"):
                mean = sum(weight * state[moment].double() for weight, state in zip(self.averaging, states)).float()
                for state in states:
                    state[moment].copy_(mean)
            steps = round(sum(weight * state["step"].item() for weight, state in zip(self.averaging, states)))
            for state in states:
                state["step"].fill_(steps)

    @torch.no_grad()
    def apply(self):
        fragment, _, means = self.under_way
        self.under_way = None
        if self.recipe.average_moments:
            self.average_moments()
        anchors = list(self.anchor.parameters())
        members = [n for n in self.of_fragment[fragment] if means[n] is not None]
        for n in members:
            anchors[n].grad = anchors[n] - means[n]
        if self.outers[fragment]:
            self.outers[fragment].step()
        for n in members:
            if not self.outers[fragment]:
                anchors[n].copy_(means[n])
            for group in self.groups:
                mine = list(group.model.parameters())[n]
                mine.copy_(self.recipe.mix * mine + (1 - self.recipe.mix) * anchors[n])
                group.anchor[n].copy_(anchors[n])


def train_unevenly(recipe, groups, shares, sequences, order, rounds):
    """Each group makes its own number of steps a round, on its own part of the batches in their order; then all go on
    with the learning rate of the one that made most."""
    offsets = [sum(shares[:group]) for group in range(len(shares))]
    own = [0] * len(groups)
    for _ in range(recipe.steps // max(recipe.every)):
        for group, (member, steps) in enumerate(zip(groups, recipe.every)):
            for _ in range(steps):
                first = own[group] * recipe.batch + offsets[group]
                member.step(sequences[order[first:first + shares[group]]])
                own[group] += 1
            for _ in range(max(recipe.every) - steps):
                member.schedule.step()
        rounds.average()


def make_outer(recipe, parameters):
    if not recipe.nesterov:
        return None
    lr, momentum = recipe.nesterov
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


def train(recipe):
    model = transformers.LlamaForCausalLM.from_pretrained(recipe.weights, dtype=torch.float32)
    averaging = recipe.averaging or [1.0 / recipe.groups] * recipe.groups
    groups = [Group(recipe, copy.deepcopy(model)) for _ in range(recipe.groups)]
    sequences = torch.from_numpy(windows(read_tokens(recipe.train)))
    order = data_order(recipe.train, recipe.steps * recipe.batch, recipe.seed)
    rounds = Rounds(recipe, groups, averaging)
    shares = recipe.shares or [recipe.batch // recipe.groups] * recipe.groups
    for group in groups:
        group.set_anchor()
    if not isinstance(recipe.every, int):
        train_unevenly(recipe, groups, shares, sequences, order, rounds)
    for step in range(recipe.steps if isinstance(recipe.every, int) else 0):
        first = step * recipe.batch
        batches = []
        for share in shares:
            batches.append(sequences[order[first:first + share]])
            first += share
        since_warm_up = step + 1 - recipe.start_step
        if since_warm_up <= 0:
            step_together(groups, batches)
            assign(rounds.anchor, groups[0].model.parameters())
            for group in groups:
                group.set_anchor()
            continue
        for group, batch in zip(groups, batches):
            group.step(batch)
        if recipe.every > 0:
            rounds.after_step(since_warm_up)
    if rounds.under_way:
        rounds.apply()
    means = mean_of(groups, averaging, recipe.group_local)
    for group in groups:
        assign(group.model, means)
    eval_loss, eval_tokens = evaluate(recipe, [group.model for group in groups])
    return Outcome([g.losses for g in groups], [g.norms for g in groups], groups[0].lrs, eval_loss, eval_tokens)
