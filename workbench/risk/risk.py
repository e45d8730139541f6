"""The risk of one planned training, as numbers and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.formatting import percent, rounded
from workbench.rates.drift import Estimate
from workbench.risk.edge_model import EdgeModel
from workbench.risk.shipped_model import shipped

if TYPE_CHECKING:
    import xarray as xr


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
        low, high = percent(self.low).removesuffix(" %"), percent(self.high)
        return f"{percent(self.value)} ({low}-{high})"


@dataclass(frozen=True)
class Risk:
    """What is known of a planned training before it begins; printed, it is a sentence.

    Attributes:
        learning_rate: The planned peak rate.
        n_steps: The planned number of updates.
        d_model: Width of the model.
        failure: Probability that the rate is too large to learn well (`workbench.rates.useful_band`).
        explosion: Probability that the training diverges by RKSP's limits.
        useful_edge: Largest rate with which it learns well.
        explosion_edge: Rate from which it diverges.
        reason: Why these are NaN; empty: they are known.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("norms").isel(run=[0])
        >>> risk = wb.risk.predict(wb.sweeps.replan(case, learning_rate=1e-4))
        >>> str(risk).startswith("At a rate of 0.0001")
        True
    """

    learning_rate: float
    n_steps: int
    d_model: int
    failure: Chance
    explosion: Chance
    useful_edge: Estimate
    explosion_edge: Estimate
    reason: str

    def __str__(self) -> str:
        rate = f"At a rate of {rounded(self.learning_rate)}"
        if self.reason:
            return f"{rate} the risk is unknown. {self.reason} Find out with wb.find_rate."
        edge = self.useful_edge
        return (
            f"{rate}: {self.failure} risk of not learning well within {self.n_steps:,} updates at width {self.d_model}, "
            f"{percent(self.explosion.value)} of an explosion; learns well up to {rounded(edge.value)} "
            f"({rounded(edge.low)}-{rounded(edge.high)})."
        )


def predict(case: xr.Dataset, model: EdgeModel | None = None) -> Risk:
    """Predict the risk of one planned training from its settings and what was measured before it.

    Args:
        case: Case of one run, from `workbench.sweeps.measure_case` or a sweep.
        model: Model of the edges; None: the shipped one.

    Raises:
        OptionError: If the learning rate is no positive number.
        SchemaError: If the case lacks a value.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("norms").isel(run=[0])
        >>> slow, fast = (wb.risk.predict(wb.sweeps.replan(case, learning_rate=rate)) for rate in (1e-4, 1e-2))
        >>> slow.failure.value < fast.failure.value
        True
    """
    found = (model or shipped()).predict(case)

    def three(name: str) -> tuple[float, float, float]:
        value, low, high = (float(found[f"{name}{end}"].values[0]) for end in ("", "_low", "_high"))
        return value, low, high

    def number(name: str) -> float:
        return float(case[name].values.reshape(-1)[0])

    return Risk(
        number("learning_rate"),
        int(number("n_steps")),
        int(number("d_model")),
        Chance(*three("failure")),
        Chance(*three("explosion")),
        Estimate(*three("useful_edge")),
        Estimate(*three("explosion_edge")),
        str(found["reason"].values[0]),
    )
