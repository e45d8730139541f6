"""A ladder of sizes of one design, and short training runs on its rungs."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, cast

from torch import nn

from workbench.callbacks.train import train
from workbench.errors import OptionError
from workbench.scaling.designs import Design
from workbench.tasks import Task, as_task
from workbench.training.low_precision import quick_products
from workbench.training.step_record import StepRecord
from workbench.training.training_plan import TrainingPlan

#: Blocks that a model must have for its residual stream to be found.
SMALLEST_DEPTH = 2


class Parametrization(Protocol):
    """Width-dependent rules of initialization and training, such as `workbench.baselines.MuP`.

    Example:
        >>> import workbench as wb
        >>> mup = wb.baselines.MuP(base_width=16)
        >>> design = wb.design({"d_model": 64, "n_layers": 2})
        >>> workshop = wb.scaling.Workshop(design, wb.tasks.random_tokens(), parametrization=mup)
        >>> workshop.parametrization.multiplier(design.build(32))
        2.0
    """

    def apply(self, model: nn.Module) -> Any:
        """Apply the rules to a fresh model, in place."""

    def optimizer(self, model: nn.Module, rate: float, name: str = "AdamW", **options: Any) -> Any:
        """Make an optimizer for this model and this rate, as ``train(optimizer=)`` takes it."""


@dataclass(frozen=True, order=True)
class Rung:
    """One size of a ladder.

    Example:
        >>> import workbench as wb
        >>> sorted([wb.scaling.Rung(width=16, depth=4), wb.scaling.Rung(width=8, depth=2)])[0]
        Rung(width=8, depth=2)
    """

    width: int
    depth: int


def rungs_of(design: Design, widths: Sequence[int], depths: Sequence[int]) -> list[Rung]:
    """The sizes of a ladder: every width at the smallest depth, and every further depth at the largest width.

    Raises:
        OptionError: If there is none, one comes twice, or a model of that size cannot be built.
    """
    for name, sizes in (("widths", widths), ("depths", depths)):
        if not len(sizes):
            raise OptionError(f"{name} is empty, expected at least one.")
        if len(set(sizes)) != len(sizes):
            raise OptionError(f"{name} holds a size twice ({list(sizes)}); name each once.")
    if min(depths) < SMALLEST_DEPTH:
        raise OptionError(
            f"depths begins with {min(depths)}, expected at least {SMALLEST_DEPTH}: a single block cannot be told "
            "from other modules."
        )
    shallow, wide = min(depths), max(widths)
    rungs = [Rung(width, shallow) for width in sorted(widths)]
    rungs += [Rung(wide, depth) for depth in sorted(depths) if depth != shallow]
    for rung in rungs:
        design.resized(rung.width, rung.depth)
    return rungs


@dataclass(frozen=True)
class Workshop:
    """Builds the models of a design and trains them briefly, each time from fresh parameters.

    Attributes:
        design: The design.
        task: The task; or a function from the seed to it.
        training: Fields of `TrainingPlan` except ``n_steps``, ``learning_rate`` and ``seed``.
        parametrization: See `Parametrization`; None: the design's own.
        vocabulary: Size of the models' vocabulary; None: that of the task where it has one and the design's is larger,
            else that of the design. For a design that reads images likewise the number of classes, more or fewer.

    Raises:
        OptionError: If a setting is unknown, or not supported here.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 32, "n_layers": 2, "max_length": 8})
        >>> task = wb.tasks.random_tokens(vocab_size=16, length=8)
        >>> workshop = wb.scaling.Workshop(design, task, training={"warmup": 2})
        >>> model = workshop.model(wb.scaling.Rung(width=16, depth=2), seed=0)
        >>> model.config.d_model, model.config.vocab_size
        (16, 16)
    """

    design: Design
    task: Any
    training: Mapping[str, Any] = field(default_factory=dict)
    parametrization: Parametrization | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        known = [item.name for item in fields(TrainingPlan) if item.name not in ("n_steps", "learning_rate", "seed")]
        for name in self.training:
            if name not in known:
                raise OptionError(f"'{name}' is no setting of the short runs, expected one of {', '.join(known)}.")
        if self.parametrization is not None and not isinstance(self.training.get("optimizer", "AdamW"), str):
            raise OptionError("A parametrization makes the optimizer itself; pass optimizer= by its name.")
        TrainingPlan(n_steps=1, **self.training)

    def model(self, rung: Rung, seed: int) -> nn.Module:
        """Build a fresh model."""
        model = self.design.build(rung.width, rung.depth, seed, vocabulary=self._vocabulary())
        if self.parametrization is not None:
            self.parametrization.apply(model)
        return model

    def n_weights(self, rung: Rung) -> int:
        """Number of parameters of the models of a size."""
        return self.design.n_weights(rung.width, rung.depth, vocabulary=self._vocabulary())

    def task_of(self, seed: int) -> Task:
        """The task of a seed."""
        is_maker = callable(self.task) and not hasattr(self.task, "stream")
        return as_task(self.task(seed) if is_maker else self.task)

    def runs(
        self, model: nn.Module, seed: int, rate: float, n_steps: int, *, is_plain: bool = False
    ) -> Iterator[StepRecord]:
        """Train a model and yield one record for each update.

        Args:
            model: A model from `model`.
            seed: Seed of the task and of all randomness in training.
            rate: Peak learning rate.
            n_steps: Updates.
            is_plain: Train at a constant rate, ignoring the plan's warm-up and schedule.
        """
        training = dict(self.training)
        if is_plain:
            training |= {"warmup": 0, "schedule": "constant"}
        if self.parametrization is None:
            training["learning_rate"] = rate
        else:
            name, options = training.get("optimizer", "AdamW"), training.pop("optimizer_options", {})
            training["optimizer"] = self.parametrization.optimizer(model, rate, name, **options)
        run = cast(
            Generator[StepRecord, None, None],
            train(model, self.task_of(seed), n_steps=n_steps, seed=seed, **training),
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

    def cause_of_divergence(self, rung: Rung, seed: int, rate: float, n_steps: int, *, is_plain: bool = False) -> str:
        """Why a run from fresh parameters diverged (RKSP's label); empty if it did not."""
        cause = ""
        for record in self.runs(self.model(rung, seed), seed, rate, n_steps, is_plain=is_plain):
            cause = record.cause
        return cause

    def _vocabulary(self) -> int | None:
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
        OptionError: If there are none, or one comes twice.
    """
    seeds = tuple(int(seed) for seed in seeds)
    if not seeds or len(set(seeds)) != len(seeds):
        raise OptionError(f"seeds is {list(seeds)}, expected at least one, each once.")
    return seeds
