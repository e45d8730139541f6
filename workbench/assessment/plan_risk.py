"""The predicted risk of a plan: whether it learns well, whether it explodes, and the useful rates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench.risk.edge_model import LEVEL
from workbench.risk.shipped_model import shipped

if TYPE_CHECKING:
    import xarray as xr


def plan_risk(case: xr.Dataset, *, stand_in: str = "") -> xr.Dataset:
    """Predict the risk of one planned run.

    Args:
        case: Case from `workbench.sweeps.measure_case`.
        stand_in: A sentence why the case does not apply to the planned run, where a stand-in was measured;
            empty: it is the planned run's own.

    Returns:
        Dataset with dim ``run`` (one): the probabilities ``failure`` (of a rate that is too small or too large to learn
        well), ``too_small``, ``too_large`` and ``explosion``, and the rates ``slow_edge``, ``useful_edge`` and
        ``explosion_edge``, each with ``_low`` and ``_high``. All are NaN where nothing comparable was measured, and for
        a stand-in; the attribute ``warning`` then gives the reason in one sentence.
    """
    found = shipped().predict(case)
    reason = str(found["reason"].values[0])
    found = found.drop_vars("reason")
    if stand_in:
        found = found.where(False)
    return found.assign_attrs(warning=stand_in or reason, level=LEVEL)


def middle_rate(risk: xr.Dataset) -> float:
    """The middle, on a logarithmic scale, of the rates that are predicted to learn well; NaN: they are not known.

    Args:
        risk: Dataset of `plan_risk`.
    """
    return math.sqrt(float(risk["slow_edge"][0]) * float(risk["useful_edge"][0]))
