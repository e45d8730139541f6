"""Predicted risk of planned runs against the learning rate, and the rates predicted to learn well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import counted, percent
from workbench.option_checks import PositiveFloat
from workbench.plots import outcome_colors, style
from workbench.plots.dataset_columns import by_name, require_variables
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives, decades

if TYPE_CHECKING:
    import xarray as xr

_SIZE = (640, 320)
_USEFUL, _FAILURE = style.MODEL_COLORS[2], style.MODEL_COLORS[0]
_EDGES = ("slow_edge", "useful_edge", "useful_edge_low", "useful_edge_high")
_PROBABILITIES = ("failure", "failure_low", "failure_high", "explosion")


@redrawable
def risk_curve(
    risk: xr.Dataset | Mapping[str, xr.Dataset], *, learning_rate: PositiveFloat | None = None, backend: str = "bokeh"
) -> Any:
    """Draw the probability of not learning well against the learning rate, for one planned run or several designs.

    The figure of one run also shows the interval and the probability of an explosion. The green band holds the rates
    predicted to learn well; the vertical line is the largest of them, and the bar at its foot the interval of it.
    The figure of several designs has one line each, with a large mark at the largest rate predicted to learn well.

    Args:
        risk: Dataset from `workbench.risk.over_rates`, or several by name.
        learning_rate: Planned learning rate, drawn as a dot on the curve of one run; None draws no dot.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a dataset lacks a variable, or its risk is unknown.
        OptionError: If the backend does not exist, or there is no design.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> case = wb.samples.open("divergence_sweep", "norms").isel(run=[0])
        >>> risk = wb.risk.over_rates(wb.sweeps.replan(case, n_steps=400), np.geomspace(1e-4, 1, 5))
        >>> len(wb.plots.risk_curve(risk)), len(wb.plots.risk_curve({"one": risk, "other": risk}))  # panels
        (1, 1)

    See Also:
        `workbench.risk.over_rates`: Computes the probabilities.
        `workbench.plots.pilot_losses`: Draws measured losses of short runs.
    """
    import xarray as xr

    is_one = isinstance(risk, xr.Dataset)
    named = by_name(risk, what="risk", source="wb.risk.over_rates()")
    for name, data in named.items():
        what = f"risk of '{name}'" if name else "risk"
        require_variables(data, (*_PROBABILITIES, *_EDGES), what=what, source="wb.risk.over_rates()")
        if np.isnan(data["failure"].values.astype(float)).all():
            reason = str(data.attrs.get("reason", ""))
            raise SchemaError(f"The {what} is unknown. {reason}".strip())
    rates = np.concatenate([data["learning_rate"].values.astype(float) for data in named.values()])
    view = float(rates.min()), float(rates.max())
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "probability")
        notes = _draw_one(draw, named[""], learning_rate) if is_one else _draw_designs(draw, named)
        panel = draw.panel(
            title="Risk vs. learning rate",
            note=notes,
            view=(view, (0.0, 1.0)),
            size=_SIZE,
            names=("learning rate", "probability" if is_one else "probability of not learning well"),
            ticks=(decades(*view), [0.0, 0.25, 0.5, 0.75, 1.0]),
            formats=("plain", "percent"),
            is_log=(True, False),
            legend=True,
        )
        return style.laid_out(hv, [panel], backend)


def _draw_one(draw: Primitives, risk: xr.Dataset, learning_rate: float | None) -> Sequence[str]:
    """Draw the risk of one planned run, and return the explanations of the marks."""
    rate = risk["learning_rate"].values.astype(float)
    failure, low, high, explosion = (risk[name].values.astype(float) for name in _PROBABILITIES)
    slow, edge, *interval = (float(np.clip(float(risk[name]), rate[0], rate[-1])) for name in _EDGES)
    notes = []
    if slow < edge:
        draw.boxes(slow, 0, edge, 1, colors=_USEFUL, alpha=0.22)
        within = f"within {counted(risk.attrs['n_steps'], 'update')} at width {risk.attrs['d_model']}"
        notes.append(f"green: rates predicted to learn well {within}")
    if rate[0] < edge < rate[-1]:
        draw.bars(edge, 0, edge, 1, color=_USEFUL, width=2)
    if interval[0] < interval[1]:
        draw.bars(interval[0], 0.02, interval[1], 0.02, color=_USEFUL, width=5)
        notes.append("bar: interval of the largest one")
    draw.band(rate, low, high, color=_FAILURE)
    draw.line(rate, failure, color=_FAILURE, width=2.4, label="not learning well")
    if np.isfinite(explosion).any():
        draw.line(rate, explosion, color=outcome_colors.DIVERGED, dash="dashed", width=2, label="explosion")
    if learning_rate is not None and rate[0] <= learning_rate <= rate[-1]:
        at = _failure_at(risk, learning_rate)
        tips = [("planned learning rate", "$x"), ("not learning well", percent(at))]
        draw.dots([learning_rate], [at], color=_FAILURE, size=13, edge=outcome_colors.MARK_GROUND, tips=tips)
    return notes


def _draw_designs(draw: Primitives, named: Mapping[str, xr.Dataset]) -> Sequence[str]:
    """Draw one line for each design, and return the explanations of the marks."""
    notes = []
    for place, (name, risk) in enumerate(named.items()):
        styling = style.model_style(place)
        rate, failure = (risk[one].values.astype(float) for one in ("learning_rate", "failure"))
        draw.line(rate, failure, color=styling["color"], dash=styling["dash"], width=2.2, label=name)
        edge = float(risk["useful_edge"])
        if rate[0] <= edge <= rate[-1]:
            tips = [("", name), ("largest useful rate", "$x")]
            draw.dots(
                [edge], [_failure_at(risk, edge)], color=styling["color"], marker=styling["marker"], size=13,
                edge=outcome_colors.MARK_GROUND, tips=tips,
            )  # fmt: skip
            notes = ["large mark: largest rate predicted to learn well"]
    return notes


def _failure_at(risk: xr.Dataset, rate: float) -> float:
    """Return the probability of not learning well at a rate, interpolated between those of the dataset."""
    return float(np.interp(np.log(rate), np.log(risk["learning_rate"].values.astype(float)), risk["failure"].values))
