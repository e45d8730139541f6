"""The predicted risk of a planned training over the learning rate, and the rates that learn well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import counted, percent
from workbench.plots import outcome_colors, style
from workbench.plots.primitives import Primitives, decades

if TYPE_CHECKING:
    import xarray as xr

_SIZE = (640, 320)
_USEFUL, _FAILURE = style.MODEL_COLORS[2], style.MODEL_COLORS[0]
_EDGES = ("slow_edge", "useful_edge", "useful_edge_low", "useful_edge_high")
_CHANCES = ("failure", "failure_low", "failure_high", "explosion")


def risk_curve(risk: xr.Dataset, *, learning_rate: float | None = None, backend: str = "bokeh") -> Any:
    """Draw the probabilities of not learning well and of an explosion over the learning rate.

    The green band holds the rates that are predicted to learn well; the upright line is the largest one, and the bar at
    its foot its interval.

    Args:
        risk: Dataset of `workbench.risk.over_rates`.
        learning_rate: The planned rate, a dot on the curve; None: not drawn.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the dataset is another one, or its risk is not known.
        OptionError: If the backend does not exist.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("norms").isel(run=[0])
        >>> figure = wb.plots.risk_curve(wb.risk.over_rates(case, np.geomspace(1e-4, 1, 20)))
        >>> len(figure)  # panels
        1
    """
    if missing := [name for name in (*_CHANCES, *_EDGES) if name not in risk.variables]:
        raise SchemaError(f"The dataset lacks {', '.join(missing)}; pass one from wb.risk.over_rates().")
    rate = risk["learning_rate"].values.astype(float)
    failure, low, high, explosion = (risk[name].values.astype(float) for name in _CHANCES)
    if np.isnan(failure).all():
        raise SchemaError(f"The risk is not known. {risk.attrs.get('reason', '')}".strip())
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "probability")
        slow, edge, *interval = (float(np.clip(float(risk[name]), rate[0], rate[-1])) for name in _EDGES)
        draw.boxes(slow, 0, edge, 1, colors=_USEFUL, alpha=0.22)
        draw.bars(edge, 0, edge, 1, color=_USEFUL, width=2)
        draw.bars(interval[0], 0.02, interval[1], 0.02, color=_USEFUL, width=5)
        draw.band(rate, low, high, color=_FAILURE)
        draw.line(rate, failure, color=_FAILURE, width=2.4, label="does not learn well")
        if np.isfinite(explosion).any():
            draw.line(rate, explosion, color=outcome_colors.DIVERGED, dash="dashed", width=2, label="explodes")
        if learning_rate is not None and rate[0] <= learning_rate <= rate[-1]:
            at = float(np.interp(np.log(learning_rate), np.log(rate), failure))
            tips = [("planned rate", "$x"), ("does not learn well", percent(at))]
            draw.dots([learning_rate], [at], color=_FAILURE, size=13, edge=outcome_colors.MARK_GROUND, tips=tips)
        within = f"within {counted(risk.attrs['n_steps'], 'update')} at width {risk.attrs['d_model']}"
        notes = [f"green: rates that learn well {within}", "bar: interval of the largest one"]
        panel = draw.panel(
            title="Risk over the learning rate",
            note=notes,
            view=((rate[0], rate[-1]), (0.0, 1.0)),
            size=_SIZE,
            names=("learning rate", "probability"),
            ticks=(decades(rate[0], rate[-1]), [0.0, 0.25, 0.5, 0.75, 1.0]),
            formats=("plain", "percent"),
            is_log=(True, False),
            legend=True,
        )
        return style.laid_out(hv, [panel], backend)
