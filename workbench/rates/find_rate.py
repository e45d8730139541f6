"""Find the learning rate for a model and a task by a pilot of short runs."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import OptionError
from workbench.formatting import counted, duration, rounded
from workbench.io.progress import Progress
from workbench.models.losses import token_loss
from workbench.rates.drift import SOURCES, UNKNOWN, Estimate, decays, extrapolated, furthest, longest_measured
from workbench.rates.pilot_runs import LoopRuns, ModelRuns, PilotRuns
from workbench.rates.rate_search import HIGHEST, LONGEST_SHARE, LOWEST, RateSearch, Round, has_learned_more
from workbench.rates.useful_band import RESOLUTION
from workbench.tasks.task import require_whole
from workbench.training.training_plan import NO_OPTIONS, TrainingPlan
from workbench.zoo.module_of import HoldsModel

if TYPE_CHECKING:
    import xarray as xr

#: The rate at which the search begins.
_START, _START_OF_SGD = 3e-3, 0.1
_SMALLEST_BUDGET = 200
#: Factor by which explosion edges of seven architectures were off the rule, at most, and factor in the width.
_WIDTH_ERROR, _WIDTH_RATIO = 1.5, 4.0
#: Optimizers whose rates follow that rule.
_ADAMS = ("adam", "adamw", "adamax", "nadam", "radam")
#: How much longer than the runs of a pilot a training may be before the answer has a warning: edges of trainings 2.4
#: times as long were placed better than those of trainings 4, 8 and 10 times as long (``data/rate_accuracy.csv``).
_SURE_GROWTH = 4.0


@dataclass(frozen=True)
class FoundRates:
    """Learning rates for a planned training, from a pilot; printed, they are a sentence.

    Attributes:
        n_steps: Updates of the planned training.
        slow_edge: Estimate of the smallest useful rate (`workbench.rates.useful_band`).
        best_rate: Estimate of the best rate.
        useful_edge: Estimate of the largest useful rate.
        reason: Why the estimates are NaN, and what to do; empty: they are known.
        n_updates: Updates of the pilot, over all runs.
        seconds: Duration of the pilot.
        rounds: What each round of the pilot measured.
        trivial_loss: Loss of the predictor that knows the frequencies of the targets alone; nat; NaN: not known.
        optimizer: Name of the optimizer; empty: not known.
        is_interrupted: Whether the pilot was interrupted before its end.
        width_ratio: Width of the model that the rates are for over that of the pilot's.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
        >>> task = wb.tasks.random_tokens(length=8, vocab_size=16, batch_size=2)
        >>> found = wb.find_rate(model, task, n_steps=1000, budget=200, progress=False)
        >>> print(found)  # doctest: +ELLIPSIS
        No rate learned more than how often each target occurs within ...
    """

    n_steps: int
    slow_edge: Estimate
    best_rate: Estimate
    useful_edge: Estimate
    reason: str
    n_updates: int
    seconds: float
    rounds: tuple[Round, ...]
    trivial_loss: float
    optimizer: str
    is_interrupted: bool
    width_ratio: float = 1.0

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        n_rates = len({rate for one in self.rounds for rate in one.rate})
        cost = f"{counted(n_rates, 'rate')}, {counted(self.n_updates, 'update')}, {duration(self.seconds)}."
        cost = f"Pilot: {cost}" if not self.is_interrupted else f"Interrupted pilot: {cost}"
        if self.reason:
            return f"{self.reason} {cost}"
        return (
            f"Over {self.n_steps:,} updates the best learning rate is about {self.best_rate}; rates from "
            f"{self.slow_edge} up to {self.useful_edge} learn about as well (80 % intervals).{self.caveat} {cost}"
        )

    @property
    def caveat(self) -> str:
        """What makes the estimates less sure than others, as sentences after a space; empty: nothing."""
        sentences = []
        edge = self.last_with_edge
        if edge is not None and self.n_steps > _SURE_GROWTH * edge.n_updates:
            ratio, budget = self.n_steps / edge.n_updates, math.ceil(self.n_steps / _SURE_GROWTH / LONGEST_SHARE)
            sentences.append(
                f" The training is {ratio:.0f} times as long as the runs of the pilot, and such estimates are often "
                f"far off; a budget of {budget:,} gives longer runs."
            )
        if self.n_steps > longest_measured():
            sentences.append(
                f" How rates change was measured up to {longest_measured():,} updates; beyond, this is an assumption."
            )
        if self.width_ratio != 1:
            sentences.append(
                f" They are those of a model {self.width_ratio:g} times as wide as the pilot's, by Adam's rule."
            )
        return "".join(sentences)

    @property
    def has_learned(self) -> bool:
        """Whether some rate learned more than how often each target occurs, where that is known."""
        return bool(self.rounds) and has_learned_more(self.rounds[-1].loss, self.trivial_loss)

    @property
    def last_with_edge(self) -> Round | None:
        """The last round in which a rate was too large."""
        return next((one for one in reversed(self.rounds) if math.isfinite(one.useful_edge)), None)

    def for_width(self, ratio: float, *, parametrization: str = "standard") -> FoundRates:
        """The rates of the same design at another width, with Adam's rule for matrices.

        In the standard parametrization rates fall as 1 / width, in muP they stay (Yang et al. 2022, arXiv:2203.03466).
        The error of the rule widens the intervals by a factor of 1.5 for each factor of 4 in the width, and at least by
        that: the largest error of explosion edges at 256 from those at 64, of eight recorded width studies
        (`workbench.samples.scaling`). Beyond a factor of 4 that growth is an assumption.

        Args:
            ratio: Width of the target over that of the pilot's model.
            parametrization: ``"standard"`` or ``"mup"``.

        Raises:
            OptionError: If the ratio is not positive, there is no such parametrization, or the optimizer is not of
                Adam's family.
        """
        if self.optimizer and not is_of_adam(self.optimizer):
            raise OptionError(
                f"The rule is Adam's, but the pilot used {self.optimizer}; run a pilot at the target width."
            )
        if isinstance(ratio, bool) or not (isinstance(ratio, Real) and math.isfinite(ratio) and ratio > 0):
            raise OptionError(f"ratio is {ratio!r}, expected a positive number: target width / pilot's width.")
        if parametrization not in ("standard", "mup"):
            raise OptionError(f"parametrization is {parametrization!r}, expected 'standard' or 'mup'.")
        factor = 1 / float(ratio) if parametrization == "standard" else 1.0
        error = 1.0 if ratio == 1 else _WIDTH_ERROR ** max(1.0, abs(math.log(float(ratio), _WIDTH_RATIO)))
        found = with_estimates(self, {name: rate.times(factor, error=error) for name, rate in self.estimates.items()})
        return replace(found, width_ratio=self.width_ratio * float(ratio))

    @property
    def estimates(self) -> dict[str, Estimate]:
        """The estimated rates by name."""
        return {name: getattr(self, name) for name in SOURCES}

    @property
    def data(self) -> xr.Dataset:
        """Losses by number of updates, rate and seed, and the estimates, for `workbench.plots.pilot_losses`."""
        import xarray as xr

        rate = np.unique(np.concatenate([one.rate for one in self.rounds])) if self.rounds else np.empty(0)
        lengths = list(dict.fromkeys(one.n_updates for one in self.rounds))
        n_seeds = max((one.loss.shape[1] for one in self.rounds), default=1)
        loss = np.full((len(lengths), len(rate), n_seeds), np.nan)
        for one in self.rounds:  # a later round of the same length knows more
            loss[lengths.index(one.n_updates), np.searchsorted(rate, one.rate)] = one.loss
        estimates = {
            f"{name}{end}": value
            for name, found in self.estimates.items()
            for end, value in (("", found.value), ("_low", found.low), ("_high", found.high))
        }
        return xr.Dataset(
            {
                "loss": (("n_updates", "rate", "seed"), loss, {"long_name": "held-out loss", "units": "nat"}),
                "trivial_loss": self.trivial_loss,
                **estimates,
            },
            {"n_updates": lengths, "rate": ("rate", rate, {"long_name": "learning rate", "units": "1"})},
            {"n_steps": self.n_steps, "reason": self.reason},
        )


def is_of_adam(optimizer: Any) -> bool:
    """Whether rates of an optimizer, given as plans do, follow Adam's rule for widths."""
    return (optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")).lower() in _ADAMS


def find_rate(
    model: HoldsModel | nn.Module | Callable[[int], nn.Module] | None = None,
    task: Any = None,
    *,
    n_steps: int,
    budget: int = 1000,
    loop: Callable[[float, int], Iterable[float]] | None = None,
    n_seeds: int = 2,
    start: float | None = None,
    warmup: int = 0,
    schedule: str | Callable[[int], float] = "constant",
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "AdamW",
    optimizer_options: Mapping[str, Any] = NO_OPTIONS,
    clip_norm: float | None = None,
    precision: str = "float32",
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    progress: bool | Callable[[str], None] = True,
) -> FoundRates:
    """Find the best and the largest useful learning rate for a planned training by a pilot on copies of the model.

    The pilot tries rates a factor 3.4 apart for a few updates, then those around the best one and the useful edge with
    a fifth of the budget each, at a constant rate after a warm-up of at most a third of their updates; at rates above
    the best one, runs that are clearly worse are stopped. The rates that decide are repeated with a second seed where
    the budget allows it: longer runs tell more than a second seed does. If the rate of the training will decay, losses
    are those of the mean weights over the last fifth of the updates, which are near those after a decay. The rates for
    the whole training are extrapolated; how well, is measured on the recorded study of learning rates
    (``data/README.md``). Interrupting it (in a notebook: the stop button) ends the pilot and gives the answer of the
    rounds that were finished.

    Args:
        model: Model or checkpoint that each run begins with, or a function from a seed to one. It is not changed.
        task: What it will be trained on; see `workbench.tasks.as_task`. Losses are those of held-out examples: the
            task's own, or its first batches (8, of few batches a fifth), which no run is trained on.
        n_steps: Updates of the planned training.
        budget: Updates of the pilot at most, over all rates and seeds. Beside these, each run measures the held-out
            loss four to seven times; a task that has held-out examples gives 4,096 token states of them.
        loop: In place of model and task, a training loop of your own: a function from a rate and a seed that trains a
            fresh model at this rate, constant after a short warm-up, and yields the training loss of each update. It
            runs only as far as needed, and is closed; it must not end early at large losses, as `workbench.train` does
            without ``stops_at_divergence=False``. Of the settings below only ``start`` and ``schedule``, that of the
            planned training, go with it.
        n_seeds: Seeds at most.
        start: Rate at which the search begins, between 1e-9 and 1e6; None: .003, for SGD .1.
        warmup: As in `workbench.train`.
        schedule: As in `workbench.train`; the pilot itself runs at a constant rate.
        optimizer: As in `workbench.train`, but not a ready optimizer.
        optimizer_options: As in `workbench.train`.
        clip_norm: As in `workbench.train`.
        precision: As in `workbench.train`.
        loss: As in `workbench.train`.
        progress: Show how far it is; or a function that gets a text after each update, whose exceptions end the pilot.

    Returns:
        What was found. Print it for a sentence; `workbench.plots.pilot_losses` draws its ``data``.

    Raises:
        OptionError: If neither model and task nor a loop are given, or both; a setting is impossible, or given beside a
            loop; or the data or the loop end too early.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=16)
        >>> task = wb.tasks.associative_recall(length=16, vocab_size=16, n_pairs=3, batch_size=8)
        >>> found = wb.find_rate(model, task, n_steps=300, budget=400, progress=False)
        >>> found.n_updates <= 400
        True
    """
    require_whole(1, n_steps=n_steps, n_seeds=n_seeds)
    require_whole(_SMALLEST_BUDGET, budget=budget)
    if (loop is None) == (model is None) or (model is None) != (task is None):
        raise OptionError("find_rate takes a model and a task, or loop= alone.")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            "A ready optimizer cannot be used on copies of the model; name its class, or pass a function that makes it."
        )
    if start is not None and not LOWEST < start < HIGHEST:
        raise OptionError(f"start is {start}, expected a learning rate between {LOWEST:g} and {HIGHEST:g}.")
    settings: dict[str, Any] = {
        "warmup": warmup,
        "schedule": schedule,
        "optimizer": optimizer,
        "optimizer_options": optimizer_options,
        "clip_norm": clip_norm,
        "precision": precision,
    }
    plan = TrainingPlan(n_steps=n_steps, learning_rate=start, **settings)
    if loop is not None:
        own = {name: value for name, value in settings.items() if name != "schedule"}
        _refuse_beside_a_loop({**own, "loss": loss})
    begun = time.monotonic()
    with Progress(progress, "made", total=budget, unit="trial update") as bar:
        if loop is not None:
            runs: PilotRuns = LoopRuns(loop, bar.update)
        elif model is not None:
            longest = min(n_steps, math.ceil(LONGEST_SHARE * budget))
            own = {name: value for name, value in settings.items() if name != "schedule"}
            runs = ModelRuns(
                model, task, own, longest, n_seeds, has_mean_weights=decays(plan), loss=loss, on_update=bar.update
            )
        rounds, is_interrupted = _rounds(RateSearch(runs, budget, n_steps, n_seeds), _start_of(plan))
    name = "" if loop is not None else optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")
    found = FoundRates(
        n_steps, UNKNOWN, UNKNOWN, UNKNOWN, "", runs.n_updates, time.monotonic() - begun, rounds, runs.trivial_loss,
        name, is_interrupted,
    )  # fmt: skip
    of_loop = loop is not None
    if (reason := _reason(found, plan, budget, of_loop)) or found.last_with_edge is None:
        return replace(found, reason=reason)
    return with_estimates(found, extrapolated(found.last_with_edge, plan, of_loop=of_loop))


def with_estimates(found: FoundRates, estimates: Mapping[str, Estimate]) -> FoundRates:
    """The same with other estimates."""
    slow, best, edge = (estimates[name] for name in SOURCES)
    return replace(found, slow_edge=slow, best_rate=best, useful_edge=edge)


def _refuse_beside_a_loop(settings: dict[str, Any]) -> None:
    """Refuse settings that a loop of the user's own would not get."""
    defaults = inspect.signature(find_rate).parameters
    if given := [name for name, value in settings.items() if value != defaults[name].default]:
        raise OptionError(f"{', '.join(given)} would not reach your loop; set it there, and pass loop= without it.")


def _rounds(search: RateSearch, start: float) -> tuple[tuple[Round, ...], bool]:
    """The rounds, or those that were finished if interrupted after the first, and whether it was."""
    rounds: list[Round] = []
    try:
        for one in search.rounds(start):
            rounds.append(one)  # noqa: PERF402  (what was found has to outlive an interrupt)
    except KeyboardInterrupt:
        if not rounds:
            raise
        return tuple(rounds), True
    return tuple(rounds), False


def _start_of(plan: TrainingPlan) -> float:
    if plan.learning_rate is not None:
        return plan.learning_rate
    return _START_OF_SGD if isinstance(plan.optimizer, str) and plan.optimizer.lower() == "sgd" else _START


def _reason(found: FoundRates, plan: TrainingPlan, budget: int, of_loop: bool) -> str:
    """Why the rates of the training cannot be said, and what to do; empty: they can."""
    if not found.rounds:
        return "No rate gave a finite loss; check the data and the loss, or choose a smaller start=."
    last = found.rounds[-1]
    if not found.has_learned:
        return (
            f"No rate learned more than how often each target occurs within {last.n_updates} updates; ask again with a "
            f"larger budget, such as {3 * budget:,}."
        )
    edge = found.last_with_edge
    if edge is None and np.nanmax(last.loss) - np.nanmin(last.loss) < RESOLUTION:
        return "The loss is the same at every rate; check that the training uses the rate it is given."
    if edge is None:
        return (
            f"No rate tried was too large, up to {last.rate[-1]:.2g}. Ask again with a larger budget, such as "
            f"{2 * budget:,}, or start={last.rate[-1]:.2g}."
        )
    if (reach := furthest(edge, of_loop=of_loop)) < plan.n_steps:
        upper = extrapolated(edge, replace(plan, n_steps=reach), of_loop=of_loop)["useful_edge"]
        return (
            f"How rates change was measured up to {reach:,} updates for a pilot of this length, not up to "
            f"{plan.n_steps:,}. Rates above {rounded(upper.high)} are probably too large even for {reach:,}. Ask again "
            f"with a budget of {math.ceil(budget * plan.n_steps / reach):,}."
        )
    return ""
