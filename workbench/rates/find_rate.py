"""Search for the learning rate of a model and a task by a pilot, and its extrapolation to a longer training.

Best rate and useful edge decrease with the length of a run; the amount is fitted to pilots of the recorded study of
learning rates (``data/fit_rates.py``).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import OptionError
from workbench.formatting import counted, duration, rounded
from workbench.io.progress import Progress
from workbench.models.losses import token_loss
from workbench.option_checks import checked
from workbench.option_kinds import PositiveFloat, PositiveInt, Remedy, above, at_least, one_of
from workbench.rates.outcomes import RESOLUTION
from workbench.rates.rate_search import (
    HIGHEST,
    LONGEST_SHARE,
    LOWEST,
    LoopRuns,
    ModelRuns,
    PilotRuns,
    RateSearch,
    Round,
    has_learned_more,
)
from workbench.training.training_plan import TrainingOptions, TrainingPlan, takes_settings
from workbench.zoo.module_of import HoldsModel

if TYPE_CHECKING:
    import xarray as xr


#: Rate of a training -> the rate of a round of the pilot from which it is extrapolated.
SOURCES = {"slow_edge": "best_rate", "best_rate": "best_rate", "useful_edge": "useful_edge"}
_FILE = Path(__file__).parent / "shipped" / "drift.json"


@dataclass(frozen=True)
class Estimate:
    """An estimated learning rate and an interval that contains the true value in about 80 % of cases; NaN if unknown.

    Attributes:
        value: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Example:
        >>> import workbench as wb
        >>> print(wb.rates.Estimate(0.004, 0.003, 0.006))
        0.004 (0.003-0.006)

    See Also:
        `workbench.find_rate`: Returns estimates.
    """

    value: float
    low: float
    high: float

    def times(self, factor: PositiveFloat, *, error: PositiveFloat = 1.0) -> Estimate:
        """Return the estimate multiplied by a factor.

        Args:
            factor: The factor.
            error: Uncertainty of the factor: the interval is widened by this factor on either side.
        """
        return Estimate(self.value * factor, self.low * factor / error, self.high * factor * error)

    def at_most(self, limit: float) -> Estimate:
        """Return the estimate with its value and lower end limited from above."""
        return Estimate(min(self.value, limit), min(self.low, limit), self.high)

    def at_least(self, limit: float) -> Estimate:
        """Return the estimate with its value and both ends limited from below."""
        return Estimate(max(self.value, limit), max(self.low, limit), max(self.high, limit))

    def probability_below(self, rate: float) -> float:
        """Return the probability that the estimated rate lies below a given one.

        On either side of the value the logarithm of the rate is normally distributed, with the end of the interval as
        its 10 % or 90 % quantile.

        Args:
            rate: A learning rate.
        """
        distance = math.log(rate / self.value)
        reach = math.log(self.low / self.value) if distance < 0 else math.log(self.high / self.value)
        return NormalDist().cdf(distance / abs(reach) * NormalDist().inv_cdf(0.9)) if reach else float(distance >= 0)

    def __str__(self) -> str:
        return f"{rounded(self.value)} ({rounded(self.low)}-{rounded(self.high)})"


UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def extrapolated(last: Round, plan: TrainingPlan, *, of_loop: bool = False) -> dict[str, Estimate]:
    """Extrapolate slow edge, best rate and useful edge of a training, by name, from the last round of a pilot.

    The logarithm of each rate is the logarithm of the round's rate in `SOURCES` plus a linear function of `features`.
    The interval is given by quantiles of the residuals in the study, with each family predicted from the others; it is
    wider after a first round.
    """
    fitted = _fitted_to(last, of_loop)
    values = features(last.n_updates, last.best_rate, last.useful_edge, plan)
    found = []
    for name, source in SOURCES.items():
        change = sum(weight * values[key] for key, weight in fitted[name]["weights"].items())
        ends = (0.0, fitted[name]["low"], fitted[name]["high"])
        found.append(Estimate(*(getattr(last, source) * math.exp(change + by) for by in ends)))
    slow, best, edge = found
    best = best.at_most(edge.value)
    return {"slow_edge": slow.at_most(best.value), "best_rate": best, "useful_edge": edge}


def features(n_updates: int, best_rate: float, useful_edge: float, plan: TrainingPlan) -> dict[str, float]:
    """Return the features from which the change of the rates between pilot and training is predicted."""
    growth = math.log(plan.n_steps / n_updates)
    width = math.log(useful_edge / best_rate)
    return {"constant": 1.0, "growth": growth, "decays": float(decays(plan)), "width": width}


def decays(plan: TrainingPlan) -> bool:
    """Return whether the learning rate of a training changes after the warm-up."""
    return callable(plan.schedule) or plan.schedule != "constant"


def furthest(last: Round, *, of_loop: bool = False) -> int:
    """Return the largest number of updates to which the rates of a round can be extrapolated."""
    return round(_fitted_to(last, of_loop)["largest_growth"] * last.n_updates)


def longest_measured() -> int:
    """Return the number of updates of the longest runs of the study."""
    return int(_fitted()["longest"])


def _fitted_to(last: Round, of_loop: bool) -> dict[str, Any]:
    """Return the coefficients that were fitted to rounds of the same kind."""
    found: dict[str, Any] = _fitted()["loop" if of_loop else "model"]["coarse" if last.is_coarse else "fine"]
    return found


@cache
def _fitted() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


#: Learning rate at which the search begins.
_START, _START_OF_SGD = 3e-3, 0.1
_MIN_BUDGET = 200
#: Largest error factor of the rule for widths, in the explosion edges of seven architectures; and the factor between
#: the widths for which it was measured.
_WIDTH_ERROR, _WIDTH_RATIO = 1.5, 4.0
#: Optimizers whose rates follow Adam's rule for widths.
_ADAMS = ("adam", "adamw", "adamax", "nadam", "radam")
#: Largest ratio of the length of a training to that of the pilot runs without a warning: edges of trainings 2.4 times
#: as long were estimated better than those of trainings 4, 8 and 10 times as long (``data/rate_accuracy.csv``).
_MAX_GROWTH = 4.0


@dataclass(frozen=True)
class FoundRates:
    """Estimated learning rates for a planned training; ``print`` shows a summary.

    Attributes:
        n_steps: Updates of the planned training.
        slow_edge: Estimate of the smallest useful rate (`workbench.rates.useful_band`).
        best_rate: Estimate of the best rate.
        useful_edge: Estimate of the largest useful rate.
        reason: Why the estimates are NaN, and what to do; empty if the rates are known.
        n_updates: Updates of the pilot, over all runs.
        seconds: Duration of the pilot.
        rounds: Results of each round of the pilot.
        trivial_loss: Loss of the predictor that knows only the frequencies of the targets; nat; NaN if unknown.
        optimizer: Name of the optimizer; empty if unknown.
        is_interrupted: Whether the pilot was interrupted before its end.
        width_ratio: Width of the model to which the rates apply over the width of the pilot's model.
        rate_factor: Factor between a rate of the pilot's model and the same rate of the model to which they apply.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
        >>> task = wb.tasks.random_tokens(length=8, vocab_size=16, batch_size=2)
        >>> found = wb.find_rate(model, task, n_steps=1000, budget=200, progress=False)
        >>> print(found)  # doctest: +ELLIPSIS
        No rate learned more than the frequencies of the targets within ...

    See Also:
        `workbench.find_rate`: Returns them.
        `workbench.plots.pilot_losses`: Draws their ``data``.
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
    rate_factor: float = 1.0

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
        """Sentences about what makes the estimates less certain, each after a space; empty if there is nothing."""
        sentences = []
        edge = self.last_with_edge
        if edge is not None and self.n_steps > _MAX_GROWTH * edge.n_updates:
            ratio, budget = self.n_steps / edge.n_updates, math.ceil(self.n_steps / _MAX_GROWTH / LONGEST_SHARE)
            sentences.append(
                f" The training is {ratio:.0f} times as long as the pilot runs, and such estimates are often far off; "
                f"pass budget={budget:,} for longer pilot runs."
            )
        if self.n_steps > longest_measured():
            sentences.append(
                f" The change of the rates with the length of training was measured up to {longest_measured():,} "
                "updates; beyond that, it is extrapolated."
            )
        if self.width_ratio != 1:
            sentences.append(
                f" The rates are for a model {self.width_ratio:g} times as wide as the pilot's, by Adam's rule."
            )
        return "".join(sentences)

    @property
    def has_learned(self) -> bool:
        """Whether some rate learned more than the frequencies of the targets; any finite loss if these are unknown."""
        return bool(self.rounds) and has_learned_more(self.rounds[-1].loss, self.trivial_loss)

    @property
    def last_with_edge(self) -> Round | None:
        """The last round in which a rate was too large."""
        return next((one for one in reversed(self.rounds) if math.isfinite(one.useful_edge)), None)

    @checked
    def for_width(
        self,
        ratio: Annotated[float, above(0), Remedy("pass target width / width of the pilot's model")],
        *,
        parametrization: Annotated[str, one_of(("standard", "mup"))] = "standard",
    ) -> FoundRates:
        """Return the rates of the same design at another width, by Adam's rule for matrices.

        In the standard parametrization rates are proportional to 1 / width; in muP they do not depend on the width
        (Yang et al. 2022, arXiv:2203.03466). The error of the rule widens the intervals by a factor of 1.5 for each
        factor of 4 in the width, and by at least 1.5. This is the largest error of explosion edges at width 256
        predicted from width 64, in eight recorded width studies (`workbench.samples.open`). Beyond a factor of 4 the
        growth of the error is an assumption.

        Args:
            ratio: Target width over the width of the pilot's model.
            parametrization: ``"standard"`` or ``"mup"``.

        Raises:
            OptionError: If the ratio is not positive, the parametrization is unknown, or the optimizer is not of
                Adam's family.
        """
        if self.optimizer and not is_of_adam(self.optimizer):
            raise OptionError(f"Adam's rule for widths does not hold for {self.optimizer}; run a pilot at that width.")
        factor = 1 / float(ratio) if parametrization == "standard" else 1.0
        error = 1.0 if ratio == 1 else _WIDTH_ERROR ** max(1.0, abs(math.log(float(ratio), _WIDTH_RATIO)))
        found = with_estimates(self, {name: rate.times(factor, error=error) for name, rate in self.estimates.items()})
        return replace(found, width_ratio=self.width_ratio * float(ratio), rate_factor=self.rate_factor * factor)

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
        for one in self.rounds:  # A later round of the same length has more seeds.
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
            {"n_steps": self.n_steps, "reason": self.reason, "rate_factor": self.rate_factor},
        )


def is_of_adam(optimizer: Any) -> bool:
    """Return whether the rates of an optimizer follow Adam's rule for widths."""
    return (optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")).lower() in _ADAMS


@checked
@takes_settings(without=("learning_rate", "seed", "loss_limit", "grad_norm_limit", "stops_at_divergence"))
def find_rate(
    model: HoldsModel | nn.Module | Callable[[int], nn.Module] | None = None,
    task: Any = None,
    *,
    n_steps: PositiveInt,
    budget: Annotated[int, at_least(_MIN_BUDGET)] = 1000,
    loop: Callable[[float, int], Iterable[float]] | None = None,
    n_seeds: PositiveInt = 2,
    start: PositiveFloat | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    progress: bool | Callable[[str], None] = True,
    **settings: Unpack[TrainingOptions],
) -> FoundRates:
    """Estimate the best learning rate and the band of useful rates of a planned training by a pilot.

    The pilot trains copies of the model. It first tries rates a factor of 3.4 apart for a few updates, then rates
    around the best one and the useful edge, with a fifth of the budget for each run. Every run has a constant learning
    rate after a warm-up of at most a third of its updates. At rates above the best one, runs that are clearly worse are
    stopped. If the budget allows it, the decisive rates are repeated with a second seed; longer runs are more
    informative than a second seed. If the learning rate of the training will decay, the loss is that of the parameters
    averaged over the last fifth of the updates, which is close to the loss after a decay. The rates for the full
    training are extrapolated from those of the pilot; the accuracy was measured on the recorded study of learning rates
    (``data/README.md``). An interrupt (in a notebook: the stop button) ends the pilot; the rates are then estimated
    from the finished rounds.

    Args:
        model: Model or checkpoint with the initial parameters of each run, or a function that creates one from a seed.
            It is not changed.
        task: The task of the training; see `workbench.tasks.as_task`. Losses are measured on the task's held-out
            examples. If it has none, its first 8 batches (at most a fifth of the batches) are held out, and no run is
            trained on them.
        n_steps: Updates of the planned training.
        budget: Maximum number of updates of the pilot, over all rates and seeds. In addition each run measures the
            held-out loss four to seven times, on 4,096 token states if the task has held-out examples.
        loop: A custom training loop instead of model and task: a function of a learning rate and a seed that trains a
            new model at this rate, constant after a short warm-up, and yields the training loss of each update. It runs
            only as long as needed, and is then closed. It must not end early at large losses; `workbench.train` needs
            ``stops_at_divergence=False`` for that. Of the other settings, only ``start`` and ``schedule`` (of the
            planned training) can be combined with a loop.
        n_seeds: Maximum number of seeds.
        start: Learning rate at which the search begins, between 1e-9 and 1e6; if None, 0.003, or 0.1 for SGD.
        loss: As in `workbench.train`.
        progress: Show the progress; or a function that receives a message after each update and may end the pilot by
            raising an exception.
        **settings: Settings of the training as in `workbench.train`. The pilot itself has a constant rate; an existing
            optimizer cannot be used.

    Returns:
        The estimated rates. Print them for a summary; `workbench.plots.pilot_losses` draws their ``data``.

    Raises:
        OptionError: If neither model and task nor a loop are given, or both are; if a setting is invalid, or cannot be
            combined with a loop; or if the data or the loop end too early.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=16)
        >>> task = wb.tasks.associative_recall(length=16, vocab_size=16, n_pairs=3, batch_size=8)
        >>> found = wb.find_rate(model, task, n_steps=300, budget=400, progress=False)
        >>> found.n_updates <= 400
        True

    See Also:
        `workbench.rates.FoundRates`: Describes the result.
        `workbench.plots.pilot_losses`: Draws the losses of the pilot.
        `workbench.risk.predict`: Predicts the risk of a planned run, with a pilot if there is one.
    """
    if (loop is None) == (model is None) or (model is None) != (task is None):
        raise OptionError("find_rate() needs either a model and a task, or loop=.")
    plan = TrainingPlan(n_steps=n_steps, **settings)
    if isinstance(plan.optimizer, torch.optim.Optimizer):
        raise OptionError("An existing optimizer does not fit copies of the model; name its class, or pass a function.")
    if start is not None and not LOWEST < start < HIGHEST:
        raise OptionError.of("start", start, f"a learning rate between {LOWEST:g} and {HIGHEST:g}")
    if loop is not None:
        default = TrainingPlan(n_steps=n_steps, schedule=plan.schedule)
        given = [name for name in settings if getattr(plan, name) != getattr(default, name)]
        if given := [*given, *(["loss"] if loss is not token_loss else [])]:
            word = "it" if len(given) == 1 else "them"
            raise OptionError(f"{', '.join(given)} cannot be combined with loop=; set {word} in the loop.")
    start_time = time.monotonic()
    with Progress(progress, "ran", total=budget, unit="trial update") as bar:
        if loop is not None:
            runs: PilotRuns = LoopRuns(loop, bar.update)
        elif model is not None:
            longest = min(n_steps, math.ceil(LONGEST_SHARE * budget))
            constant = replace(plan, schedule="constant")
            runs = ModelRuns(
                model, task, constant, longest, n_seeds, averages_parameters=decays(plan), loss=loss,
                on_update=bar.update,
            )  # fmt: skip
        first = _START_OF_SGD if str(plan.optimizer).lower() == "sgd" else _START
        rounds: list[Round] = []
        is_interrupted = False
        try:
            for one in RateSearch(runs, budget, n_steps, n_seeds).rounds(start or first):
                rounds.append(one)  # noqa: PERF402  (finished rounds have to survive an interrupt)
        except KeyboardInterrupt:
            if not rounds:
                raise
            is_interrupted = True
    optimizer = plan.optimizer
    name = "" if loop is not None else optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")
    found = FoundRates(
        n_steps, UNKNOWN, UNKNOWN, UNKNOWN, "", runs.n_updates, time.monotonic() - start_time, tuple(rounds),
        runs.trivial_loss, name, is_interrupted,
    )  # fmt: skip
    of_loop = loop is not None
    if (reason := _reason(found, plan, budget, of_loop)) or found.last_with_edge is None:
        return replace(found, reason=reason)
    return with_estimates(found, extrapolated(found.last_with_edge, plan, of_loop=of_loop))


def with_estimates(found: FoundRates, estimates: Mapping[str, Estimate]) -> FoundRates:
    """Return the found rates with other estimates."""
    slow, best, edge = (estimates[name] for name in SOURCES)
    return replace(found, slow_edge=slow, best_rate=best, useful_edge=edge)


def _reason(found: FoundRates, plan: TrainingPlan, budget: int, of_loop: bool) -> str:
    """Return why the rates of the training cannot be estimated, and what to do; empty if they can."""
    if not found.rounds:
        return "No rate yielded a finite loss; check the data and the loss, or choose a smaller start=."
    last = found.rounds[-1]
    if not found.has_learned:
        return (
            f"No rate learned more than the frequencies of the targets within {last.n_updates} updates; repeat the "
            f"pilot with a larger budget, such as {3 * budget:,}."
        )
    edge = found.last_with_edge
    if edge is None and np.nanmax(last.loss) - np.nanmin(last.loss) < RESOLUTION:
        return "The loss is the same at every rate; check that the training uses the rate that it receives."
    if edge is None:
        return (
            f"No rate tried was too large, up to {last.rate[-1]:.2g}. Repeat the pilot with a larger budget, such as "
            f"{2 * budget:,}, or start={last.rate[-1]:.2g}."
        )
    if (reach := furthest(edge, of_loop=of_loop)) < plan.n_steps:
        upper = extrapolated(edge, replace(plan, n_steps=reach), of_loop=of_loop)["useful_edge"]
        return (
            f"Rates of a pilot of this length can be extrapolated to {reach:,} updates, not to {plan.n_steps:,}. Rates "
            f"above {rounded(upper.high)} are probably too large even for {reach:,} updates. Repeat the pilot with a "
            f"budget of {math.ceil(budget * plan.n_steps / reach):,}."
        )
    return ""
