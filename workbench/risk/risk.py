"""The risk of a planned training before it starts, as probabilities and as a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import counted, percent, rounded
from workbench.rates.find_rate import Estimate, FoundRates
from workbench.risk.edge_model import EDGES, MAX_PROBABILITY, EdgeModel, shipped
from workbench.risk.features import RATE, as_cases, column

if TYPE_CHECKING:
    import xarray as xr

#: Names of the probabilities of a planned training.
_PROBABILITIES = ("too_small", "too_large", "failure", "explosion")
#: Suffix of the name of a variable -> attribute of a probability or an estimate.
_PARTS = {"": "value", "_low": "low", "_high": "high"}


@dataclass(frozen=True)
class Probability:
    """A probability with an interval; NaN if unknown.

    Attributes:
        value: The probability.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Example:
        >>> import workbench as wb
        >>> print(wb.risk.Probability(0.2, 0.05, 0.43))
        20 % (5 to 43 %)

    See Also:
        `workbench.risk.Risk`: Contains probabilities.
    """

    value: float
    low: float
    high: float

    def at_most(self, limit: float) -> Probability:
        """Return the probability with its value and both ends limited from above."""
        return Probability(min(self.value, limit), min(self.low, limit), min(self.high, limit))

    def __str__(self) -> str:
        low, high = percent(self.low), percent(self.high)
        if math.isnan(self.low) or low == high:
            return percent(self.value)
        return f"{percent(self.value)} ({low.removesuffix(' %')} to {high})"


@dataclass(frozen=True)
class Risk:
    """Predicted outcome of a planned training before it starts; ``print`` shows a sentence.

    Attributes:
        learning_rate: Planned peak learning rate.
        n_steps: Planned number of updates.
        d_model: Width of the model.
        failure: Probability that the learning rate is too small or too large to learn well
            (`workbench.rates.useful_band`).
        too_small: Probability that it is too small for the number of updates.
        too_large: Probability that it is too large.
        explosion: Probability that the training diverges by RKSP's limits.
        slow_edge: Smallest rate at which the model learns well.
        useful_edge: Largest rate at which the model learns well.
        explosion_edge: Rate from which the training diverges.
        reason: Why the values are NaN (``explosion`` is 1 if the untrained model counts as diverged); empty if they are
            known.
        caveat: What makes the result of a pilot less certain; empty if there is nothing.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.open("divergence_sweep", "norms").isel(run=[0])
        >>> risk = wb.risk.predict(wb.sweeps.replan(case, learning_rate=1e-3))
        >>> str(risk).startswith("At a learning rate of 0.001")
        True

    See Also:
        `workbench.risk.predict`: Returns it.
    """

    learning_rate: float
    n_steps: int
    d_model: int
    failure: Probability
    too_small: Probability
    too_large: Probability
    explosion: Probability
    slow_edge: Estimate
    useful_edge: Estimate
    explosion_edge: Estimate
    reason: str
    caveat: str = ""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __str__(self) -> str:
        rate = f"At a learning rate of {rounded(self.learning_rate)}"
        if self.reason:
            return f"{rate} the risk is unknown. {self.reason} Run a pilot with wb.find_rate."
        explosion = "" if math.isnan(self.explosion.value) else f", {percent(self.explosion.value)} of an explosion"
        return (
            f"{rate}: {self.failure} risk of not learning well within {counted(self.n_steps, 'update')} at width "
            f"{self.d_model}{explosion}; learns well from {self.slow_edge} up to {self.useful_edge}."
            f"{self.caveat}"
        )


def predict(case: xr.Dataset, *, pilot: FoundRates | None = None, model: EdgeModel | None = None) -> Risk:
    """Predict the risk of a planned training from its settings and measurements of the untrained model.

    Args:
        case: Case of one run, from `workbench.sweeps.measure_case` or a sweep.
        pilot: Pilot of the same training, from `workbench.find_rate`. Its edges replace the predicted ones, and the
            probabilities that the learning rate is too small or too large follow from them, without intervals.
        model: Risk model; None uses the one that ships with the workbench.

    Returns:
        Probabilities and edges; NaN, with a reason, if the model was not fitted for such designs.

    Raises:
        OptionError: If the learning rate is not positive, or the pilot has no estimates or is for another number of
            updates.
        SchemaError: If the case has more than one run, or lacks a value.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.open("divergence_sweep", "norms").isel(run=[0])
        >>> plans = (wb.sweeps.replan(case, learning_rate=rate, n_steps=480) for rate in (1e-3, 1e-1))
        >>> slow, fast = (wb.risk.predict(plan) for plan in plans)
        >>> slow.too_large.value < fast.too_large.value
        True

    See Also:
        `workbench.risk.over_rates`: Predicts the risk over a range of learning rates.
        `workbench.sweeps.measure_case`: Measures a case.
        `workbench.find_rate`: Runs a pilot.
    """
    return _risks(_one(case), pilot, model)[0]


def over_rates(
    case: xr.Dataset, rates: Sequence[float] | np.ndarray, *, pilot: FoundRates | None = None,
    model: EdgeModel | None = None,
) -> xr.Dataset:  # fmt: skip
    """Predict the risk of a planned training at several learning rates, for `workbench.plots.risk_curve`.

    Args:
        case: As in `predict`; the learning rate of the case is not used.
        rates: Peak learning rates, increasing.
        pilot: As in `predict`.
        model: As in `predict`.

    Returns:
        Dataset with dimension ``learning_rate``: ``too_small``, ``too_large``, ``failure`` and ``explosion``; and the
        scalars ``slow_edge``, ``useful_edge`` and ``explosion_edge``. Each has ``_low`` and ``_high``, NaN if unknown.
        Attributes: ``sentence`` (a summary), ``n_steps``, ``d_model``, ``reason``.

    Raises:
        OptionError: If there is no rate or a rate is not positive, or as in `predict`.
        SchemaError: As in `predict`.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.open("divergence_sweep", "norms").isel(run=[0])
        >>> wb.risk.over_rates(case, [1e-3, 1e-2])["failure"].dims
        ('learning_rate',)

    See Also:
        `workbench.plots.risk_curve`: Draws the result.
        `workbench.risk.predict`: Predicts the risk at one learning rate.
    """
    import xarray as xr

    rates = np.asarray(rates, dtype=float)
    if not rates.size:
        raise OptionError("There is no learning rate; pass at least one.")
    cases = _one(case).isel(run=np.zeros(len(rates), int)).assign_coords({RATE: ("run", rates)})
    found = _risks(cases, pilot, model)
    data: dict[str, object] = {}
    for name in _PROBABILITIES:
        for end, part in _PARTS.items():
            data[f"{name}{end}"] = (RATE, [getattr(getattr(one, name), part) for one in found], {"units": "1"})
    for name in EDGES:
        for end, part in _PARTS.items():
            data[f"{name}{end}"] = ((), getattr(getattr(found[0], name), part), {"units": "1"})
    about = {"sentence": _summary(found), "n_steps": found[0].n_steps, "d_model": found[0].d_model}
    about["reason"] = found[0].reason
    return xr.Dataset(data, {RATE: rates}, about)


def _summary(risks: Sequence[Risk]) -> str:
    """Summarize the risk over several learning rates: where it is smallest, and the useful rates."""
    if risks[0].reason:
        return f"The risk is unknown. {risks[0].reason} Run a pilot with wb.find_rate."
    best = min(risks, key=lambda one: one.failure.value)
    return (
        f"The risk of not learning well within {counted(best.n_steps, 'update')} is smallest at a learning rate of "
        f"{rounded(best.learning_rate)}: {best.failure}; learns well from {best.slow_edge} up to {best.useful_edge}."
    )


def _one(case: xr.Dataset) -> xr.Dataset:
    """Return a case with a dimension ``run`` of length one."""
    case = as_cases(case)
    if (n_runs := case.sizes["run"]) != 1:
        raise SchemaError(f"The case must have one run, got {n_runs}; select one with .isel(run=[0]).")
    return case


def _risks(cases: xr.Dataset, pilot: FoundRates | None, model: EdgeModel | None) -> list[Risk]:
    """Return the risk of each case."""
    found = (model or shipped()).predict(cases)
    settings = {name: column(cases, name) for name in (RATE, "n_steps", "d_model")}
    risks = []
    for i in range(cases.sizes["run"]):
        parts = {name: [float(found[f"{name}{end}"][i]) for end in _PARTS] for name in (*_PROBABILITIES, *EDGES)}
        too_small, too_large, failure, explosion = (Probability(*parts[name]) for name in _PROBABILITIES)
        slow_edge, useful_edge, explosion_edge = (Estimate(*parts[name]) for name in EDGES)
        risk = Risk(
            float(settings[RATE][i]), int(settings["n_steps"][i]), int(settings["d_model"][i]), failure, too_small,
            too_large, explosion, slow_edge, useful_edge, explosion_edge, str(found["reason"].values[i]),
        )  # fmt: skip
        risks.append(risk if pilot is None else _after_pilot(risk, pilot))
    return risks


def _after_pilot(risk: Risk, pilot: FoundRates) -> Risk:
    """Return the risk with a pilot's edges, whose useful edge limits the probability of an explosion."""
    if pilot.reason:
        raise OptionError(f"The pilot has no estimates: {pilot.reason}")
    if pilot.n_steps != risk.n_steps:
        raise OptionError(
            f"The pilot is for {pilot.n_steps:,} updates, the case plans {risk.n_steps:,}; run a pilot for as many."
        )
    small = 1 - pilot.slow_edge.probability_below(risk.learning_rate)
    large = pilot.useful_edge.probability_below(risk.learning_rate)
    failure, too_small, too_large = (
        Probability(value, math.nan, math.nan) for value in (min(small + large, MAX_PROBABILITY), small, large)
    )
    starts_diverged = risk.explosion.value == 1
    return replace(
        risk, failure=failure, too_small=too_small, too_large=too_large,
        explosion=risk.explosion if starts_diverged else risk.explosion.at_most(large),
        slow_edge=pilot.slow_edge, useful_edge=pilot.useful_edge,
        explosion_edge=risk.explosion_edge.at_least(pilot.useful_edge.value), reason="", caveat=pilot.caveat,
    )  # fmt: skip
