"""Ladders of sizes of a design, and short training runs on their rungs."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, cast

from torch import nn

from workbench.callbacks.train import train
from workbench.errors import OptionError, require_known
from workbench.scaling.designs import Design
from workbench.tasks import Task, as_task
from workbench.training.low_precision import quick_products
from workbench.training.step_record import StepRecord
from workbench.training.training_plan import TrainingPlan

#: Minimum number of blocks of a model for its residual stream to be found.
SMALLEST_DEPTH = 2


class Parametrization(Protocol):
    """Width-dependent rules of initialization and training, such as `workbench.baselines.MuP`."""

    def apply(self, model: nn.Module) -> Any:
        """Apply the rules to a model with initial parameters, in place."""

    def optimizer(self, model: nn.Module, rate: float, name: str = "AdamW", **options: Any) -> Any:
        """Create an optimizer for a model and a learning rate, as accepted by ``train(optimizer=)``."""


@dataclass(frozen=True, order=True)
class Rung:
    """One size of a ladder.

    Attributes:
        width: Width of the residual stream.
        depth: Number of residual blocks.
    """

    width: int
    depth: int


def rungs_of(design: Design, widths: Sequence[int], depths: Sequence[int]) -> list[Rung]:
    """Return the sizes of a ladder: every width at the smallest depth, and every other depth at the largest width.

    Raises:
        OptionError: If there are none, a size is given twice, or a model of that size cannot be built.
    """
    for name, sizes in (("widths", widths), ("depths", depths)):
        if not len(sizes) or len(set(sizes)) != len(sizes):
            raise OptionError.of(name, tuple(sizes), "at least one size, without duplicates")
    if min(depths) < SMALLEST_DEPTH:
        raise OptionError(
            f"depths must be at least {SMALLEST_DEPTH}, because a single block cannot be distinguished from other "
            f"modules, got {min(depths)}."
        )
    shallow, wide = min(depths), max(widths)
    rungs = [Rung(width, shallow) for width in sorted(widths)]
    rungs += [Rung(wide, depth) for depth in sorted(depths) if depth != shallow]
    for rung in rungs:
        design.resized(rung.width, rung.depth)
    return rungs


@dataclass(frozen=True)
class LadderTrainer:
    """Builder of the models of a design at any rung, and of short training runs from their initial parameters.

    Attributes:
        design: The design.
        task: The task, or a function that returns it for a seed.
        training: Fields of `TrainingPlan` except ``n_steps``, ``learning_rate`` and ``seed``.
        parametrization: A `Parametrization`; None uses that of the design.
        vocabulary: Size of the vocabulary of the models. If None, it is that of the task if this is smaller than that
            of the design. For a design that reads images, the number of classes; if None, that of the task.

    Raises:
        OptionError: If a setting is unknown or not supported.
    """

    design: Design
    task: Any
    training: Mapping[str, Any] = field(default_factory=dict)
    parametrization: Parametrization | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        run_options = ("n_steps", "learning_rate", "seed")
        known = tuple(item.name for item in fields(TrainingPlan) if item.name not in run_options)
        require_known("A short run", self.training, known, word="setting")
        if self.parametrization is not None and not isinstance(self.training.get("optimizer", "AdamW"), str):
            raise OptionError("A parametrization creates the optimizer itself; pass the name of the optimizer.")
        TrainingPlan(n_steps=1, **self.training)

    def model(self, rung: Rung, seed: int) -> nn.Module:
        """Build a model with initial parameters."""
        model = self.design.build(rung.width, rung.depth, seed, vocabulary=self._vocabulary())
        if self.parametrization is not None:
            self.parametrization.apply(model)
        return model

    def n_weights(self, rung: Rung) -> int:
        """Return the number of parameters of the models of a size."""
        return self.design.n_weights(rung.width, rung.depth, vocabulary=self._vocabulary())

    def task_of(self, seed: int) -> Task:
        """Return the task of a seed."""
        is_function = callable(self.task) and not hasattr(self.task, "stream")
        return as_task(self.task(seed) if is_function else self.task)

    def runs(
        self, model: nn.Module, seed: int, rate: float, n_steps: int, *, is_rate_constant: bool = False
    ) -> Iterator[StepRecord]:
        """Train a model and yield one record for each update.

        Args:
            model: A model from `model`.
            seed: Seed of the task and of all randomness in training.
            rate: Peak learning rate.
            n_steps: Number of updates.
            is_rate_constant: Train at a constant learning rate, without warm-up and schedule.
        """
        training = dict(self.training)
        if is_rate_constant:
            training |= {"warmup": 0, "schedule": "constant"}
        if self.parametrization is None:
            training["learning_rate"] = rate
        else:
            name, options = training.get("optimizer", "AdamW"), training.pop("optimizer_options", {})
            training["optimizer"] = self.parametrization.optimizer(model, rate, name, **options)
        run = cast(
            Generator[StepRecord, None, None], train(model, self.task_of(seed), n_steps=n_steps, seed=seed, **training)
        )
        is_low = training.get("precision", "float32") != "float32"
        try:
            while True:
                with quick_products() if is_low else nullcontext():
                    record = next(run, None)
                if record is None:
                    return
                yield record
        finally:
            run.close()

    def cause_of_divergence(
        self, rung: Rung, seed: int, rate: float, n_steps: int, *, is_rate_constant: bool = False
    ) -> str:
        """Train a new model and return why it diverged (RKSP); empty if it converged.

        Args:
            rung: The size.
            seed: Seed of parameters, data and training.
            rate: Peak learning rate.
            n_steps: Number of updates.
            is_rate_constant: As in `runs`.
        """
        cause = ""
        for record in self.runs(self.model(rung, seed), seed, rate, n_steps, is_rate_constant=is_rate_constant):
            cause = record.cause
        return cause

    def _vocabulary(self) -> int | None:
        """Return the size of the vocabulary, or the number of classes; None keeps that of the design."""
        if self.vocabulary is not None:
            return self.vocabulary
        if self.design.n_classes:
            return getattr(self.task_of(0), "n_classes", None)
        if self.design.vocabulary is None:
            return None
        of_task = getattr(self.task_of(0), "vocab_size", None)
        return of_task if of_task is not None and of_task < self.design.vocabulary else None


def require_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Return the seeds as a tuple.

    Raises:
        OptionError: If there are none, or a seed is given twice.
    """
    seeds = tuple(int(seed) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise OptionError.of("seeds", seeds, "at least one seed, without duplicates")
    return seeds
