"""Learning rates of schedulers of torch, of transformers, and written by hand, for each step."""

from __future__ import annotations

import math
import warnings
from functools import cache, partial

import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

N_STEPS = 2000
PEAK = 1e-3
NOTED = ("initial_lr", "max_lr", "swa_lr")


class Stairs:
    """A scheduler that steps once per epoch."""

    def __init__(self, make, optimizer, every=100):
        self.inner, self.every, self.n = make(optimizer), every, 0

    def step(self):
        self.n += 1
        if self.n % self.every == 0:
            self.inner.step()


class OnPlateau(schedulers.ReduceLROnPlateau):
    """A scheduler with a loss that never falls."""

    def step(self):
        super().step(1.0)


def per_epoch(make):
    return partial(Stairs, make)


def _sequence(first, then, at):
    return lambda o: schedulers.SequentialLR(o, [first(o), then(o)], [at])


OF_TORCH = {
    "step": lambda o: schedulers.StepLR(o, 600, 0.1),
    "step, half": lambda o: schedulers.StepLR(o, 300, 0.5),
    "several steps": lambda o: schedulers.MultiStepLR(o, [900, 1500, 1800], 0.1),
    "plateau": lambda o: OnPlateau(o, patience=200, factor=0.3),
    "constant": lambda o: schedulers.ConstantLR(o),
    "constant, 20": lambda o: schedulers.ConstantLR(o, 0.1, 20),
    "linear": lambda o: schedulers.LinearLR(o),
    "linear, 100": lambda o: schedulers.LinearLR(o, 0.001, total_iters=100),
    "linear, falling": lambda o: schedulers.LinearLR(o, 1, 0, total_iters=1800),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.999),
    "exponential, steep": lambda o: schedulers.ExponentialLR(o, 0.9),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, N_STEPS),
    "cosine, up again": lambda o: schedulers.CosineAnnealingLR(o, 500),
    "cosine, to a floor and up again": lambda o: schedulers.CosineAnnealingLR(o, 500, 1e-4),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 500),
    "restarts, longer and longer": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 100, 2),
    "restarts, short": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 10, eta_min=1e-5),
    "polynomial": lambda o: schedulers.PolynomialLR(o, N_STEPS, 2),
    "polynomial, 5": lambda o: schedulers.PolynomialLR(o),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.998),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.95 ** (step // 30)),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 1e-2, N_STEPS + 1),
    "one cycle, linear": lambda o: schedulers.OneCycleLR(
        o, 1e-2, N_STEPS + 1, anneal_strategy="linear", three_phase=True
    ),
    "triangles": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 200),
    "triangles, halved": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 200, mode="triangular2"),
    "triangles, shrinking": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 200, mode="exp_range", gamma=0.9995),
    "triangles, steep rise": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 20, 200),
    "triangles, steep fall": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 200, 20),
    "triangles, peaks between steps": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, 30.5, 41.3),
    "triangles, short": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, 5),
    "constant, exponential": _sequence(
        lambda o: schedulers.ConstantLR(o, 0.1, 20), lambda o: schedulers.ExponentialLR(o, 0.999), 20
    ),
    "warm-up, cosine": _sequence(
        lambda o: schedulers.LinearLR(o, 1e-3, total_iters=100),
        lambda o: schedulers.CosineAnnealingLR(o, N_STEPS - 100),
        100,
    ),
    "short warm-up, cosine": _sequence(
        lambda o: schedulers.LinearLR(o, 0.01, total_iters=5), lambda o: schedulers.CosineAnnealingLR(o, N_STEPS), 5
    ),
    "constant times exponential": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 20), schedulers.ExponentialLR(o, 0.9)]
    ),
    "linear times cosine": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 1 / 3, total_iters=100), schedulers.CosineAnnealingLR(o, N_STEPS)]
    ),
    "averaging": lambda o: SWALR(o, swa_lr=5e-4, anneal_epochs=10),
    "cosine, averaging": _sequence(
        lambda o: schedulers.CosineAnnealingLR(o, 1000), lambda o: SWALR(o, swa_lr=5e-4, anneal_epochs=200), 1000
    ),
    "per epoch: warm-up, cosine": per_epoch(
        _sequence(
            lambda o: schedulers.LinearLR(o, 0.01, total_iters=5), lambda o: schedulers.CosineAnnealingLR(o, 15), 5
        )
    ),
    "per epoch: restarts": per_epoch(lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5)),
    "per epoch: cosine, up again": per_epoch(lambda o: schedulers.CosineAnnealingLR(o, 8)),
    "per epoch: exponential": per_epoch(lambda o: schedulers.ExponentialLR(o, 0.7)),
    "per epoch: polynomial": per_epoch(lambda o: schedulers.PolynomialLR(o, 5)),
}

#: Cycles with such large steps that some injected changes are indistinguishable from them.
STEEP = {
    "restarts, short",
    "triangles, short",
    "triangles, peaks between steps",
    "triangles, steep rise",
    "triangles, steep fall",
    "exponential, steep",
    "constant times exponential",
    "polynomial, 5",
    "short warm-up, cosine",
    "per epoch: warm-up, cosine",
    "per epoch: polynomial",
    "per epoch: cosine, up again",
    "transformers: inverse_sqrt, 10",
}

OF_TRANSFORMERS = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 4},
    "polynomial": {},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "warmup_stable_decay": {"num_decay_steps": 400},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "reduce_lr_on_plateau": {"patience": 200, "factor": 0.3},
}


def names():
    """Return the names of all schedules of schedulers."""
    warm_ups = [f"transformers: {name}, {n}" for name in OF_TRANSFORMERS for n in (0, 1, 10, 300)]
    without = ("inverse_sqrt, 0", "constant, 1", "constant, 10", "constant, 300")
    fixed = ("reduce_lr_on_plateau, 1", "reduce_lr_on_plateau, 10", "reduce_lr_on_plateau, 300")
    return [*OF_TORCH, *(name for name in warm_ups if name.removeprefix("transformers: ") not in (*without, *fixed))]


def _of_transformers(name, optimizer):
    from transformers import get_scheduler

    kind, _, n = name.removeprefix("transformers: ").partition(", ")
    found = get_scheduler(
        kind,
        optimizer,
        num_warmup_steps=int(n),
        num_training_steps=N_STEPS,
        scheduler_specific_kwargs=OF_TRANSFORMERS[kind],
    )
    if kind == "reduce_lr_on_plateau":
        found.__class__ = OnPlateau
    return found


@cache
def rates(name):
    """Return the rates of all steps, and the rates that the scheduler has stored at each of them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK, momentum=0.9)
    make = OF_TORCH[name] if name in OF_TORCH else partial(_of_transformers, name)
    found, noted = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(optimizer)
        group = optimizer.param_groups[0]
        for _ in range(N_STEPS):
            found.append(float(group["lr"]))
            noted.append([float(group[key]) for key in NOTED if group.get(key) is not None])
            scheduler.step()
    return found, noted


FALLS = {
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "linear": lambda x: 1 - x,
    "square": lambda x: (1 - x) ** 2,
    "root": lambda x: math.sqrt(1 - x),
    "exponential": lambda x: math.exp(-5 * x),
    "stable, linear": lambda x: min(1.0, 5 * (1 - x)),
    "stable, root": lambda x: 1 - math.sqrt(max(0.0, 5 * x - 4)),
    "constant": lambda x: 1.0,
    "steps": lambda x: 0.1 ** int(3 * x),
}
RISES = {
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
    "square": lambda x: x * x,
    "exponential": lambda x: 10 ** (3 * (x - 1)),
}


def by_hand(*, peak, warmup, n_steps, rise, fall, floor, offset, n_cycles, rewarm):
    """Return cycles of a warm-up and a fall to a floor; each begins at the peak or with a ramp."""
    found = []
    for cycle in range(n_cycles):
        n_rising = warmup if cycle == 0 else rewarm
        start = found[-1] / peak if found else 0.0
        for n in range(n_steps):
            x = (n + offset) / max(1, n_rising)
            if n < n_rising:
                share = RISES[rise](x) if cycle == 0 else start + (1 - start) * x
            else:
                share = floor + (1 - floor) * FALLS[fall](min(1.0, (n - n_rising) / (n_steps - n_rising - 2)))
            found.append(peak * share)
    return found
