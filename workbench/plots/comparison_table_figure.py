"""A comparison of architectures as a table of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.plots.radar_axes import DEFAULT_MEASURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import xarray as xr

#: Variables of a run besides its spectra, in the order of the columns; integers first.
_COUNTS = ("step", "divergence_step")
_RESULTS = ("final_loss", "final_accuracy", "best_accuracy")


def comparison_table(comparison: xr.Dataset, *, measures: Sequence[str] | None = None, digits: int = 3) -> pd.DataFrame:
    """A comparison as a table: one row per architecture, our values next to published ones.

    Args:
        comparison: Dataset from `workbench.compare`.
        measures: Names of its variables by ``architecture`` and ``source``; None takes those of the radar chart, the
            share of reliable modes and the divergence rate.
        digits: Significant digits; at least 1.

    Returns:
        Numbers under two rows of names: the variable, then "ours" or "published". Columns without any value are
        left out; NaN elsewhere means unknown. The step of the spectra comes first, the outcome of the training last.

    Raises:
        SchemaError: If the dataset is no comparison, or has no such measure.
        OptionError: If ``digits`` is below 1.

    Example:
        >>> import workbench as wb
        >>> comparison = wb.samples.initialization("norms").mean("seed")
        >>> table = wb.plots.comparison_table(comparison, measures=["near_unit_mass"])
        >>> list(table.index)[:2]
        ['Pre-LN', 'Post-LN']
    """
    import pandas as pd

    known = [name for name, v in comparison.data_vars.items() if v.dims == ("architecture", "source")]
    if not known:
        raise SchemaError("The dataset has no variables by architecture and source; make it with wb.compare().")
    measures = list(measures or (*DEFAULT_MEASURES, "reliable_fraction", "divergence_rate"))
    for measure in measures:
        if measure not in known:
            raise SchemaError(f"The comparison has no measure '{measure}'; choose from {', '.join(map(str, known))}.")
    if digits < 1:
        raise OptionError(f"digits is {digits}, expected at least 1.")
    columns = {
        (measure, source): comparison[measure].sel(source=source)
        for measure in measures
        for source in ("ours", "published")
        if source in comparison["source"]
    }
    outcome = {(name, ""): comparison[name] for name in (*_COUNTS, *_RESULTS) if name in comparison.variables}
    columns = {key: column for key, column in outcome.items() if key[0] == "step"} | columns | outcome
    table = {}
    for (name, source), column in columns.items():
        values = column.values.astype(float)
        if np.isnan(values).all():
            continue
        heading = (comparison[name].attrs.get("long_name", name), source)
        table[heading] = pd.array(values).astype("Int64") if name in _COUNTS else _rounded(values, digits)
    names, sources = zip(*table, strict=True) if table else ((), ())
    frame = pd.DataFrame(dict(enumerate(table.values())), index=comparison["architecture"].values)
    frame.columns = pd.MultiIndex.from_arrays([names, sources])
    return frame


def _rounded(values: np.ndarray, digits: int) -> np.ndarray:
    return np.array([float(f"{value:.{digits}g}") for value in values])
