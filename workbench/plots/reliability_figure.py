"""Reliability diagram: predicted probabilities of divergence against observed frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.plots import style
from workbench.plots.dataset_columns import by_name, columns_of
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

_SOURCE = "workbench.risk.scores.reliability()"
_WIDTH, _HEIGHT, _BELOW, _GAP = 380, 340, 90, 18
_SPAN = (-0.02, 1.02)
#: Horizontal distance between the bins of several predictions.
_DODGE = 0.012


@redrawable
def reliability(
    reliability: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    places: Mapping[str, int] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the observed share of diverged runs against the predicted probability, with the number of runs below.

    One dot for each bin of runs of similar predicted probability. On the dashed diagonal predictions are calibrated;
    below it they are too high, above it too low. The bars are the intervals of the observed share, which are wide for
    bins of few runs; the panel below shows the number of runs.

    Args:
        reliability: Dataset with dim ``bin``: mean_probability, rate (share that diverged), low, high and n_runs; NaN
            or 0 runs: an empty bin, which is not drawn; attrs ``ece``, the expected calibration error, and perhaps
            ``level``, that of the intervals, and ``n_left_out``, runs that got no prediction. Or several by name.
        places: Style number of each prediction (`style.model_style`), by name; None: in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of two panels with options for that backend only.

    Raises:
        SchemaError: If there is no dataset, one lacks a variable, or every bin is empty.
        OptionError: If the backend or a prediction's place does not exist.

    Example:
        >>> import workbench as wb
        >>> bins = wb.risk.reliability([0.9, 0.8, 0.2, 0.1], [True, True, False, False])
        >>> figure = wb.plots.reliability(bins)
        >>> len(figure)  # panels
        2
    """
    series = bins_of(reliability)
    order = style.model_places([bins.name for bins in series], places)
    shifts = _DODGE * (np.arange(len(series)) - (len(series) - 1) / 2)
    with style.drawing(backend) as hv:
        above = Primitives(hv, backend, "predicted probability", "share that diverged")
        below = Primitives(hv, backend, "predicted probability", "runs")
        above.line([0, 1], [0, 1], color=style.NEUTRAL, dash="dashed", width=1)
        for bins, place, shift in zip(series, order, shifts, strict=True):
            look, columns = style.model_style(place), bins.columns
            color, x = look["color"], columns["mean_probability"] + shift
            above.bars(x, columns["low"], x, columns["high"], color=color, width=1.4, alpha=0.65)
            above.line(x, columns["rate"], color=color, dash=look["dash"], width=1.6, label=bins.label)
            tips = [
                ("", bins.name),
                ("predicted", "@mean_probability{0.0 %}"),
                ("diverged", "@rate{0.0 %} of @n_runs"),
                ("interval", "@low{0 %} to @high{0 %}"),
            ]
            dots: dict[str, Any] = {
                "color": color,
                "marker": look["marker"],
                "columns": columns,
                "tips": tips[not bins.name :],
            }
            above.dots(x, columns["rate"], size=8, label=bins.label, **dots)
            below.bars(x, 0, x, columns["n_runs"], color=color, width=7 if len(series) == 1 else 4, alpha=0.85)
        most = max(bins.columns["n_runs"].max() for bins in series)
        panels = [
            above.panel(
                title="Do predicted probabilities come true?",
                note=_note(series),
                view=(_SPAN, (-0.03, 1.03)),
                size=(_WIDTH, _HEIGHT),
                names=("", "runs that diverged"),
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
    """The non-empty bins of one prediction.

    Attributes:
        name: Name of the prediction; may be empty.
        columns: ``mean_probability``, ``rate``, ``low``, ``high`` and ``n_runs``, ascending.
        ece: Expected calibration error.
        level: Confidence level of the intervals.
        n_left_out: Runs without a prediction.
    """

    name: str
    columns: dict[str, np.ndarray]
    ece: float
    level: float
    n_left_out: int

    @property
    def label(self) -> str:
        """The entry in the legend, such as "forward: ECE 0.031"."""
        left_out = f", {self.n_left_out} runs not predicted" if self.n_left_out else ""
        return (f"{self.name}: " if self.name else "") + f"ECE {self.ece:.3f}{left_out}"


def bins_of(reliability: xr.Dataset | Mapping[str, xr.Dataset]) -> list[Bins]:
    """The predictions as `reliability` draws them.

    Raises:
        SchemaError: If there is no dataset, one lacks a variable, or every bin is empty.
    """
    series = []
    needed = ["mean_probability", "rate", "low", "high", "n_runs"]
    for name, data in by_name(reliability, what="reliability table", source=_SOURCE).items():
        columns = columns_of(data, needed, what="reliability table", source=_SOURCE, dim="bin")
        has_runs = (columns["n_runs"] > 0) & np.isfinite(columns["mean_probability"])
        if not has_runs.any():
            raise SchemaError(f"No bin of the reliability table '{name}' holds a run; make it with {_SOURCE}.")
        if "ece" not in data.attrs:
            raise SchemaError(f"The reliability table '{name}' lacks the attribute ece; make it with {_SOURCE}.")
        order = np.argsort(columns["mean_probability"][has_runs])
        columns = {key: column[has_runs][order] for key, column in columns.items()}
        level, n_left_out = float(data.attrs.get("level", 0.95)), int(data.attrs.get("n_left_out", 0))
        series.append(Bins(name, columns, float(data.attrs["ece"]), level, n_left_out))
    return series


def _note(series: list[Bins]) -> list[str]:
    counts = {int(bins.columns["n_runs"].sum()) for bins in series}
    words = [f"{counts.pop()} runs, one dot a bin" if len(counts) == 1 else "one dot a bin"]
    return [*words, f"bars: {100 * series[0].level:g} % Wilson intervals", "dashed: perfect"]
