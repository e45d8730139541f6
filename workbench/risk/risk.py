"""The risk of one planned training, as numbers and as a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError
from workbench.formatting import percent, rounded
from workbench.rates.drift import Estimate
from workbench.rates.find_rate import FoundRates
from workbench.risk.edge_model import EDGES, MOST_CERTAIN, EdgeModel
from workbench.risk.shipped_model import shipped

if TYPE_CHECKING:
    import xarray as xr

#: Probabilities of a planned training.
CHANCES = ("failure", "too_small", "too_large", "explosion")


@dataclass(frozen=True)
class Chance:
    """A probability and an interval; NaN: not known.

    Attributes:
        value: The probability.
        low: Lower end.
        high: Upper end.

    Example:
        >>> import workbench as wb
        >>> print(wb.risk.Chance(0.02, 0.005, 0.13))
        2 % (0.5-13 %)
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return percent(self.value)
        return f"{percent(self.value)} ({percent(self.low).removesuffix(' %')}-{percent(self.high)})"


@dataclass(frozen=True)
class Risk:
    """What is known of a planned training before it begins; printed, it is a sentence.

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
        reason: Why these are NaN; empty: they are known.

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

    def __str__(self) -> str:
        rate = f"At a rate of {rounded(self.learning_rate)}"
        if self.reason:
            return f"{rate} the risk is unknown. {self.reason} Find out with wb.find_rate."
        return (
            f"{rate}: {self.failure} risk of not learning well within {self.n_steps:,} updates at width "
            f"{self.d_model}, {percent(self.explosion.value)} of an explosion; learns well from {self.slow_edge} up to "
            f"{self.useful_edge}."
        )


def predict(case: xr.Dataset, *, pilot: FoundRates | None = None, model: EdgeModel | None = None) -> Risk:
    """Predict the risk of one planned training from its settings and what was measured before it.

    Args:
        case: Case of one run, from `workbench.sweeps.measure_case` or a sweep.
        pilot: Pilot of the same training, from `workbench.find_rate`; its useful edge replaces the predicted one.
        model: Model of the edges; None: the shipped one.

    Raises:
        OptionError: If the learning rate is no positive number, or the pilot was made for another number of updates.
        SchemaError: If the case lacks a value.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("norms").isel(run=[0])
        >>> slow, fast = (wb.risk.predict(wb.sweeps.replan(case, learning_rate=rate)) for rate in (1e-3, 1e-1))
        >>> slow.too_large.value < fast.too_large.value
        True
    """
    return _risks((model or shipped()).predict(case), case, pilot)[0]


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
        it, ``slow_edge``, ``useful_edge`` and ``explosion_edge``; each with ``_low`` and ``_high``.

    Raises:
        OptionError: As in `predict`.
        SchemaError: As in `predict`.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("norms").isel(run=[0])
        >>> wb.risk.over_rates(case, [1e-3, 1e-2])["failure"].dims
        ('learning_rate',)
    """
    import xarray as xr

    if "run" in case.dims and case.sizes["run"] != 1:
        raise OptionError(f"There are {case.sizes['run']} cases; select one, such as case.isel(run=[0]).")
    one = case if "run" in case.dims else case.expand_dims("run")
    many = one.isel(run=np.zeros(len(rates), dtype=int)).assign_coords(learning_rate=("run", np.asarray(rates, float)))
    found = _risks((model or shipped()).predict(many), many, pilot)
    data: dict[str, object] = {}
    for name in CHANCES:
        for end, part in (("", "value"), ("_low", "low"), ("_high", "high")):
            data[f"{name}{end}"] = ("learning_rate", [getattr(getattr(one, name), part) for one in found])
    for name in EDGES:
        estimate: Estimate = getattr(found[0], name)
        data |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    about = {"n_steps": found[0].n_steps, "d_model": found[0].d_model, "reason": found[0].reason}
    return xr.Dataset(data, {"learning_rate": np.asarray(rates, dtype=float)}, about)


def _risks(found: xr.Dataset, cases: xr.Dataset, pilot: FoundRates | None) -> list[Risk]:
    """The risk of each case, from what `EdgeModel.predict` found."""
    n_runs = found.sizes["run"]

    def values(name: str) -> list[float]:
        return [float(value) for value in np.broadcast_to(cases[name].values, n_runs)]

    triples = {
        name: list(zip(*(found[f"{name}{end}"].values.tolist() for end in ("", "_low", "_high")), strict=True))
        for name in (*CHANCES, *EDGES)
    }
    plans = zip(values("learning_rate"), values("n_steps"), values("d_model"), strict=True)
    risks = []
    for i, (rate, n_steps, d_model) in enumerate(plans):
        failure, small, large, explosion = (Chance(*triples[name][i]) for name in CHANCES)
        slow, useful, exploding = (Estimate(*triples[name][i]) for name in EDGES)
        reason = str(found["reason"].values[i])
        plan = rate, int(n_steps), int(d_model)
        risks.append(Risk(*plan, failure, small, large, explosion, slow, useful, exploding, reason))
    return risks if pilot is None else [_after(risk, pilot) for risk in risks]


def _after(risk: Risk, pilot: FoundRates) -> Risk:
    """The risk after a pilot, which knows the useful rates; of explosions it knows no more than that they are failures.

    Raises:
        OptionError: If the pilot has no answer, or one for another number of updates.
    """
    if pilot.reason:
        raise OptionError(f"The pilot has no answer. {pilot.reason}")
    if pilot.n_steps != risk.n_steps:
        raise OptionError(
            f"The pilot was made for {pilot.n_steps:,} updates, but the case plans {risk.n_steps:,}; find the rate for "
            "as many."
        )
    small = 1 - pilot.slow_edge.chance_below(risk.learning_rate)
    large = pilot.useful_edge.chance_below(risk.learning_rate)
    chances = (min(small + large, MOST_CERTAIN), small, large)
    failure, too_small, too_large = (Chance(value, math.nan, math.nan) for value in chances)
    explosion = replace(risk.explosion, value=min(risk.explosion.value, large))
    return replace(
        risk, failure=failure, too_small=too_small, too_large=too_large, explosion=explosion,
        slow_edge=pilot.slow_edge, useful_edge=pilot.useful_edge, reason="",
    )  # fmt: skip
