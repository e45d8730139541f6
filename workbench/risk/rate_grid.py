"""Compute the risk of planned runs over a grid of learning rates, for the figures of risk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import ArrayLike

    from workbench.risk.risk_model import RiskModel


def over_rates(
    model: RiskModel,
    cases: xr.Dataset,
    learning_rate: ArrayLike,
    *,
    names: Sequence[str] | None = None,
    below: float = 0.20,
) -> xr.Dataset:
    """Compute the risk of each case at other learning rates.

    Args:
        model: The risk model.
        cases: Planned runs, dim ``run``; their own rates are ignored.
        learning_rate: The rates.
        names: Names of the rows; None: the architecture of each case.
        below: Share of risk at the stability edge.

    Returns:
        Dataset with dims ``architecture`` and ``learning_rate``, for `workbench.plots.risk_map` and `risk_curve`:
        probability, low, high, is_familiar; by architecture largest_stable_rate, largest_stable_rate_low and
        largest_stable_rate_high. NaN where a case is not familiar, as `RiskModel.predict` gives it.

    Raises:
        OptionError: If a rate is no positive number, there is none, or ``below`` is no probability.
        SchemaError: If two rows have one name, or a case lacks what the model needs.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("fit").isel(run=[0])
        >>> risk = wb.risk.over_rates(wb.risk.shipped("forward"), case, [1e-4, 1e-3, 1e-2])
        >>> risk["probability"].dims, bool((risk["probability"].diff("learning_rate") >= 0).all())
        (('architecture', 'learning_rate'), True)
    """
    import xarray as xr

    rates = np.asarray(learning_rate, dtype=float)
    if not rates.size:
        raise OptionError("There is no learning rate; pass at least one.")
    titles = [str(name) for name in (cases["architecture"].values if names is None else names)]
    if len(titles) != cases.sizes["run"] or len(set(titles)) != len(titles):
        raise SchemaError(f"{cases.sizes['run']} cases need as many different names; pass names=.")
    repeated = cases.isel(run=np.repeat(np.arange(len(titles)), rates.size))
    repeated = repeated.assign_coords(learning_rate=("run", np.tile(rates, len(titles))))
    found = model.predict(repeated)
    stable = model.largest_stable_rate(cases, below=below)
    dims, shape = ("architecture", "learning_rate"), (len(titles), rates.size)
    variables: dict[str, Any] = {
        name: (dims, found[name].values.reshape(shape), found[name].attrs)
        for name in ("probability", "low", "high", "is_familiar")
    }
    for name, source in (("", "largest_stable_rate"), ("_low", "low"), ("_high", "high")):
        variables[f"largest_stable_rate{name}"] = ("architecture", stable[source].values, stable[source].attrs)
    about = {"below": below, "level": model.level, "warning": found.attrs["warning"]}
    return xr.Dataset(variables, {"architecture": titles, "learning_rate": rates}, about)
