"""Table of the numbers of a comparison of architectures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.option_checks import PositiveInt, checked
from workbench.plots.radar_axes import DEFAULT_MEASURES, comparison_measures

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import xarray as xr

#: Variables of a run other than its spectra, in the order of the columns; integers come first.
_COUNTS = ("step", "divergence_step")
_RESULTS = ("final_loss", "final_accuracy", "best_accuracy")


@checked
def comparison_table(
    comparison: xr.Dataset, *, measures: Sequence[str] | None = None, digits: PositiveInt = 3
) -> pd.DataFrame:
    """Return a comparison as a table: one row per architecture, our values next to the published ones.

    Args:
        comparison: Dataset from `workbench.compare`.
        measures: Names of variables with dims ``architecture`` and ``source``; None selects those of the radar chart,
            the fraction of reliable modes and the divergence rate.
        digits: Significant digits; at least 1.

    Returns:
        Numbers under two header rows: the variable, then "ours" or "published". Columns without any value are
        omitted; NaN means unknown. The step of the spectra comes first, the outcome of the training last.

    Raises:
        SchemaError: If the dataset is not a comparison, or lacks a measure.
        OptionError: If ``digits`` is below 1.

    Example:
        >>> import workbench as wb
        >>> comparison = wb.samples.open("initialization/norms").mean("seed")
        >>> table = wb.plots.comparison_table(comparison, measures=["near_unit_mass"])
        >>> list(table.index)[:2]
        ['Pre-LN', 'Post-LN']

    See Also:
        `workbench.compare`: Creates the comparison.
        `workbench.plots.radar`: Draws the same values.
    """
    import pandas as pd

    measures = comparison_measures(comparison, measures or (*DEFAULT_MEASURES, "reliable_fraction", "divergence_rate"))
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
        table[heading] = (
            pd.array(values).astype("Int64")
            if name in _COUNTS
            else np.array([float(f"{value:.{digits}g}") for value in values])
        )
    names, sources = zip(*table, strict=True) if table else ((), ())
    frame = pd.DataFrame(dict(enumerate(table.values())), index=comparison["architecture"].values)
    frame.columns = pd.MultiIndex.from_arrays([names, sources])
    return frame
