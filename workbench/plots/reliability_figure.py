"""Reliability diagram: observed frequencies of divergence against predicted probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.option_checks import NonNegativeInt
from workbench.plots import style
from workbench.plots.dataset_columns import by_name, columns_of
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

_SOURCE = "wb.risk.reliability()"
_WIDTH, _HEIGHT, _BELOW, _GAP = 380, 340, 90, 18
_SPAN = (-0.02, 1.02)
#: Horizontal offset between the bins of several predictions.
_DODGE = 0.012


@redrawable
def reliability(
    reliability: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the observed fraction of runs that diverged against the predicted probability.

    Each dot is a bin of runs with similar predicted probability. On the dashed diagonal predictions are calibrated;
    below it they are too high, above it too low. The bars are confidence intervals of the observed fraction. The lower
    panel shows the number of runs of each bin.

    Args:
        reliability: Dataset with dim ``bin``: mean_probability, rate (fraction that diverged), low, high and n_runs; an
            empty bin has 0 runs or NaN and is not drawn. Attributes: ``ece`` (expected calibration error), optionally
            ``level`` (confidence level) and ``n_left_out`` (runs without a prediction). Or several datasets by name.
        places: Style number (color, marker, dash) of each prediction, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of two panels with options for that backend only.

    Raises:
        SchemaError: If there is no dataset, one lacks a variable, or every bin is empty.
        OptionError: If the backend does not exist, or a prediction has no style number.

    Example:
        >>> import workbench as wb
        >>> bins = wb.risk.reliability([0.9, 0.8, 0.2, 0.1], [True, True, False, False])
        >>> figure = wb.plots.reliability(bins)
        >>> len(figure)  # panels
        2

    See Also:
        `workbench.risk.reliability`: Computes the bins.
    """
    series = bins_of(reliability)
    order = style.model_places([bins.name for bins in series], places)
    shifts = _DODGE * (np.arange(len(series)) - (len(series) - 1) / 2)
    with style.drawing(backend) as hv:
        above = Primitives(hv, backend, "predicted probability", "fraction that diverged")
        below = Primitives(hv, backend, "predicted probability", "runs")
        above.line([0, 1], [0, 1], color=style.NEUTRAL, dash="dashed", width=1)
        for bins, place, shift in zip(series, order, shifts, strict=True):
            styling, columns = style.model_style(place), bins.columns
            color, x = styling["color"], columns["mean_probability"] + shift
            above.bars(x, columns["low"], x, columns["high"], color=color, width=1.4, alpha=0.65)
            above.line(x, columns["rate"], color=color, dash=styling["dash"], width=1.6, label=bins.label)
            tips = [
                ("", bins.name),
                ("predicted probability", "@mean_probability{0.0 %}"),
                ("diverged", "@rate{0.0 %} of @n_runs runs"),
                ("interval", "@low{0 %} to @high{0 %}"),
            ]
            dots: dict[str, Any] = {
                "color": color,
                "marker": styling["marker"],
                "columns": columns,
                "tips": tips[not bins.name :],
            }
            above.dots(x, columns["rate"], size=8, label=bins.label, **dots)
            below.bars(x, 0, x, columns["n_runs"], color=color, width=7 if len(series) == 1 else 4, alpha=0.85)
        most = max(bins.columns["n_runs"].max() for bins in series)
        panels = [
            above.panel(
                title="Reliability diagram",
                note=_note(series),
                view=(_SPAN, (-0.03, 1.03)),
                size=(_WIDTH, _HEIGHT),
                names=("", "fraction of runs that diverged"),
                formats=("percent", "percent"),
                legend=True,
                bare=(True, False),
                at=(0, _BELOW + _GAP),
            ),
            below.panel(
                title="",
                view=(_SPAN, (0.0, 1.08 * most)),
                size=(_WIDTH, _BELOW),
                names=("predicted probability of divergence", "runs"),
                formats=("percent", "plain"),
            ),
        ]
        return style.laid_out(hv, panels, backend)


@dataclass(frozen=True)
class Bins:
    """Non-empty bins of one prediction.

    Attributes:
        name: Name of the prediction; may be empty.
        columns: ``mean_probability`` (increasing), ``rate``, ``low``, ``high`` and ``n_runs``.
        ece: Expected calibration error.
        level: Confidence level of the intervals.
        n_left_out: Number of runs without a prediction.
    """

    name: str
    columns: dict[str, np.ndarray]
    ece: float
    level: float
    n_left_out: int

    @property
    def label(self) -> str:
        """Entry of the legend, such as "forward: ECE 0.031"."""
        left_out = f", {self.n_left_out} runs without prediction" if self.n_left_out else ""
        return (f"{self.name}: " if self.name else "") + f"ECE {self.ece:.3f}{left_out}"


def bins_of(reliability: xr.Dataset | Mapping[str, xr.Dataset]) -> list[Bins]:
    """Return the predictions as `reliability` draws them."""
    series = []
    needed = ["mean_probability", "rate", "low", "high", "n_runs"]
    for name, data in by_name(reliability, what="reliability table", source=_SOURCE).items():
        columns = columns_of(data, needed, what="reliability table", source=_SOURCE, dim="bin")
        has_runs = (columns["n_runs"] > 0) & np.isfinite(columns["mean_probability"])
        if not has_runs.any():
            raise SchemaError(f"No bin of the reliability table '{name}' holds a run; create it with {_SOURCE}.")
        if "ece" not in data.attrs:
            raise SchemaError(f"The reliability table '{name}' lacks the attribute ece; create it with {_SOURCE}.")
        order = np.argsort(columns["mean_probability"][has_runs])
        columns = {key: column[has_runs][order] for key, column in columns.items()}
        level, n_left_out = float(data.attrs.get("level", 0.95)), int(data.attrs.get("n_left_out", 0))
        series.append(Bins(name, columns, float(data.attrs["ece"]), level, n_left_out))
    return series


def _note(series: list[Bins]) -> list[str]:
    counts = {int(bins.columns["n_runs"].sum()) for bins in series}
    words = [f"{counts.pop()} runs, one dot per bin" if len(counts) == 1 else "one dot per bin"]
    return [*words, f"bars: {100 * series[0].level:g} % Wilson intervals", "dashed: perfect calibration"]
