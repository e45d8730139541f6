"""The risk of one planned training before it starts, as numbers and as a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import counted, percent, rounded
from workbench.rates.drift import Estimate
from workbench.rates.find_rate import FoundRates
from workbench.risk.edge_model import EDGES, MOST_CERTAIN, EdgeModel
from workbench.risk.features import RATE, as_cases, column
from workbench.risk.shipped_model import shipped

if TYPE_CHECKING:
    import xarray as xr

#: Probabilities of a planned training.
CHANCES = ("too_small", "too_large", "failure", "explosion")
#: End of the name of a variable -> attribute of a probability or an estimate.
_PARTS = {"": "value", "_low": "low", "_high": "high"}


@dataclass(frozen=True)
class Chance:
    """A probability and an interval; NaN: not known.

    Attributes:
        value: The probability.
        low: Lower end.
        high: Upper end.

    Example:
        >>> import workbench as wb
        >>> print(wb.risk.Chance(0.2, 0.05, 0.43))
        20 % (5 to 43 %)
    """

    value: float
    low: float
    high: float

    def at_most(self, limit: float) -> Chance:
        """The probability and both ends, no larger than a limit."""
        return Chance(min(self.value, limit), min(self.low, limit), min(self.high, limit))

    def __str__(self) -> str:
        low, high = percent(self.low), percent(self.high)
        if math.isnan(self.low) or low == high:
            return percent(self.value)
        return f"{percent(self.value)} ({low.removesuffix(' %')} to {high})"


@dataclass(frozen=True)
class Risk:
    """What is known of the outcome of a planned training before it starts; printed, it is a sentence.

    Attributes:
        learning_rate: The planned peak rate.
        n_steps: The planned number of updates.
        d_model: Width of the model.
        failure: Probability that the rate is too small or too large to learn well (`workbench.rates.useful_band`).
        too_small: Probability that it is too small for the number of updates.
        too_large: Probability that it is too large.
        explosion: Probability that the training diverges by RKSP's limits.
        slow_edge: Smallest rate with which it learns well.
        useful_edge: Largest rate with which it learns well.
        explosion_edge: Rate from which it diverges.
        caveat: What makes the answer of a pilot less sure than others; empty: nothing.
        reason: Why these are NaN, and ``explosion`` 1 if the fresh model counts as diverged; empty: they are known.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("norms").isel(run=[0])
        >>> risk = wb.risk.predict(wb.sweeps.replan(case, learning_rate=1e-3))
        >>> str(risk).startswith("At a rate of 0.001")
        True
    """

    learning_rate: float
    n_steps: int
    d_model: int
    failure: Chance
    too_small: Chance
    too_large: Chance
    explosion: Chance
    slow_edge: Estimate
    useful_edge: Estimate
    explosion_edge: Estimate
    reason: str
    caveat: str = ""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        rate = f"At a rate of {rounded(self.learning_rate)}"
        if self.reason:
            return f"{rate} the risk is unknown. {self.reason} Find out with wb.find_rate."
        explosion = "" if math.isnan(self.explosion.value) else f", {percent(self.explosion.value)} of an explosion"
        return (
            f"{rate}: {self.failure} risk of not learning well within {counted(self.n_steps, 'update')} at width "
            f"{self.d_model}{explosion}; learns well from {self.slow_edge} up to {self.useful_edge}."
            f"{self.caveat}"
        )


def predict(case: xr.Dataset, *, pilot: FoundRates | None = None, model: EdgeModel | None = None) -> Risk:
    """Predict the risk of one planned training from its settings and what was measured of the fresh model.

    Args:
        case: Case of one run, from `workbench.sweeps.measure_case` or a sweep.
        pilot: Pilot of the same training, from `workbench.find_rate`. Its edges replace the predicted ones, and the
            probabilities of a rate that is too small or too large follow from them, without intervals.
        model: Model of the edges; None: the shipped one.

    Returns:
        Probabilities and edges; NaN, with the reason, where the model was not fitted to such designs.

    Raises:
        OptionError: If the learning rate is no positive number, or the pilot has no answer or was made for another
            number of updates.
        SchemaError: If the case has more than one run, or lacks a value.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("norms").isel(run=[0])
        >>> plans = (wb.sweeps.replan(case, learning_rate=rate, n_steps=480) for rate in (1e-3, 1e-1))
        >>> slow, fast = (wb.risk.predict(plan) for plan in plans)
        >>> slow.too_large.value < fast.too_large.value
        True
    """
    return _risks(_one(case), pilot, model)[0]


def over_rates(
    case: xr.Dataset, rates: Sequence[float] | np.ndarray, *, pilot: FoundRates | None = None,
    model: EdgeModel | None = None,
) -> xr.Dataset:  # fmt: skip
    """Predict the risk of one planned training at several learning rates, for `workbench.plots.risk_curve`.

    Args:
        case: As in `predict`; its own rate does not matter.
        rates: Peak rates, rising.
        pilot: As in `predict`.
        model: As in `predict`.

    Returns:
        Dataset with dim ``learning_rate``: ``too_small``, ``too_large``, ``failure`` and ``explosion``; and, without
        it, ``slow_edge``, ``useful_edge`` and ``explosion_edge``; each with ``_low`` and ``_high``, NaN where it is not
        known. Attributes: ``sentence`` (the answer in words), ``n_steps``, ``d_model``, ``reason``.

    Raises:
        OptionError: If a rate is no positive number, or as in `predict`.
        SchemaError: If there is no rate, or as in `predict`.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("norms").isel(run=[0])
        >>> wb.risk.over_rates(case, [1e-3, 1e-2])["failure"].dims
        ('learning_rate',)
    """
    import xarray as xr

    rates = np.asarray(rates, dtype=float)
    if not rates.size:
        raise OptionError("There is no rate; pass at least one.")
    cases = _one(case).isel(run=np.zeros(len(rates), int)).assign_coords({RATE: ("run", rates)})
    found = _risks(cases, pilot, model)
    data: dict[str, object] = {}
    for name in CHANCES:
        for end, part in _PARTS.items():
            data[f"{name}{end}"] = (RATE, [getattr(getattr(one, name), part) for one in found], {"units": "1"})
    for name in EDGES:
        for end, part in _PARTS.items():
            data[f"{name}{end}"] = ((), getattr(getattr(found[0], name), part), {"units": "1"})
    about = {"sentence": _in_short(found), "n_steps": found[0].n_steps, "d_model": found[0].d_model}
    about["reason"] = found[0].reason
    return xr.Dataset(data, {RATE: rates}, about)


def _in_short(risks: Sequence[Risk]) -> str:
    """The risk over several rates in one sentence: where it is smallest, and the useful rates."""
    if risks[0].reason:
        return f"The risk is unknown. {risks[0].reason} Find out with wb.find_rate."
    best = min(risks, key=lambda one: one.failure.value)
    return (
        f"The risk of not learning well within {counted(best.n_steps, 'update')} is smallest at a rate of "
        f"{rounded(best.learning_rate)}: {best.failure}; learns well from {best.slow_edge} up to {best.useful_edge}."
    )


def _one(case: xr.Dataset) -> xr.Dataset:
    """A case with a dimension ``run`` of length one.

    Raises:
        SchemaError: If it has more runs.
    """
    case = as_cases(case)
    if (n_runs := case.sizes["run"]) != 1:
        raise SchemaError(f"There are {n_runs} runs, expected one; select one with .isel(run=[0]).")
    return case


def _risks(cases: xr.Dataset, pilot: FoundRates | None, model: EdgeModel | None) -> list[Risk]:
    """The risk of each of several cases."""
    found = (model or shipped()).predict(cases)
    settings = {name: column(cases, name) for name in (RATE, "n_steps", "d_model")}
    risks = []
    for i in range(cases.sizes["run"]):
        parts = {name: [float(found[f"{name}{end}"][i]) for end in _PARTS] for name in (*CHANCES, *EDGES)}
        too_small, too_large, failure, explosion = (Chance(*parts[name]) for name in CHANCES)
        slow_edge, useful_edge, explosion_edge = (Estimate(*parts[name]) for name in EDGES)
        risk = Risk(
            float(settings[RATE][i]), int(settings["n_steps"][i]), int(settings["d_model"][i]), failure, too_small,
            too_large, explosion, slow_edge, useful_edge, explosion_edge, str(found["reason"].values[i]),
        )  # fmt: skip
        risks.append(risk if pilot is None else _after(risk, pilot))
    return risks


def _after(risk: Risk, pilot: FoundRates) -> Risk:
    """The risk after a pilot, which knows the useful rates; of an explosion only that it does not learn well.

    Raises:
        OptionError: If the pilot has no answer, or one for another number of updates.
    """
    if pilot.reason:
        raise OptionError(f"The pilot has no answer. {pilot.reason}")
    if pilot.n_steps != risk.n_steps:
        raise OptionError(
            f"The pilot was made for {pilot.n_steps:,} updates, but the case plans {risk.n_steps:,}; make one "
            "for as many."
        )
    small = 1 - pilot.slow_edge.chance_below(risk.learning_rate)
    large = pilot.useful_edge.chance_below(risk.learning_rate)
    failure, too_small, too_large = (
        Chance(value, math.nan, math.nan) for value in (min(small + large, MOST_CERTAIN), small, large)
    )
    starts_diverged = risk.explosion.value == 1
    return replace(
        risk, failure=failure, too_small=too_small, too_large=too_large,
        explosion=risk.explosion if starts_diverged else risk.explosion.at_most(large),
        slow_edge=pilot.slow_edge, useful_edge=pilot.useful_edge,
        explosion_edge=risk.explosion_edge.at_least(pilot.useful_edge.value), reason="", caveat=pilot.caveat,
    )  # fmt: skip
