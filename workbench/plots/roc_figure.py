"""ROC curves of scores that predict divergence."""

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

_SOURCE = "wb.risk.roc_curve()"
_SIDE = 380


@redrawable
def roc(
    curves: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the ROC curve of one score or of several by name, with the area under each curve in the legend.

    Each point is a threshold: the fraction of diverging runs above it against the fraction of converging runs above it.
    The tooltip states the threshold. The dashed diagonal is the chance level; a curve below it has the wrong sign.

    Args:
        curves: Dataset with dim ``point``: false_positive_rate, true_positive_rate and threshold (a run with at least
            this score is predicted to diverge; infinite: no run is). Attributes: ``auroc``, optionally ``low`` and
            ``high`` of its interval, ``n_runs`` and ``n_diverged``. Or several datasets by name.
        places: Style number (color, marker, dash) of each score, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If there is no curve, or one lacks a variable or has values outside of 0 to 1.
        OptionError: If the backend does not exist, or a score has no style number.

    Example:
        >>> import workbench as wb
        >>> curve = wb.risk.roc_curve([0.1, 0.4, 0.3, 0.9], [False, False, True, True], n_bootstrap=0)
        >>> figure = wb.plots.roc({"my score": curve})
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.risk.roc_curve`: Computes a curve.
        `workbench.plots.predictor_table`: Draws the areas of many scores.
    """
    lines = lines_of(curves)
    order = style.model_places([line.name for line in lines], places)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "false positive rate", "true positive rate")
        draw.line([0, 1], [0, 1], color=style.NEUTRAL, dash="dashed", width=1)
        for line, place in zip(lines, order, strict=True):
            styling, columns = style.model_style(place), line.columns
            x, y = columns["false_positive_rate"], columns["true_positive_rate"]
            draw.line(x, y, color=styling["color"], dash=styling["dash"], width=2, label=line.label)
            if draw.is_bokeh:  # invisible dots for the tooltips
                shown = {"threshold": np.array([f"{at:.3g}" for at in columns["threshold"]])}
                tips = [
                    ("", line.name),
                    ("score at least", "@threshold"),
                    ("true positive rate", "$y{0 %}"),
                    ("false positive rate", "$x{0 %}"),
                ]
                draw.dots(
                    x, y, color=styling["color"], marker=styling["marker"], size=9, alpha=0, columns=shown, tips=tips
                )
        panel = draw.panel(
            title="ROC curve for divergence",
            note=_note(lines),
            view=((-0.02, 1.02), (-0.02, 1.02)),
            size=(_SIDE, _SIDE),
            names=("false positive rate", "true positive rate"),
            formats=("percent", "percent"),
            legend=True,
        )
        return style.laid_out(hv, [panel], backend)


@dataclass(frozen=True)
class RocLine:
    """One curve of the figure.

    Attributes:
        name: Name of the score; may be empty.
        columns: ``false_positive_rate``, ``true_positive_rate`` and ``threshold``.
        auroc: Area under the curve.
        interval: Its lower and upper bound; NaN if unknown.
        counts: Number of runs and of those that diverged; empty if unknown.
    """

    name: str
    columns: dict[str, np.ndarray]
    auroc: float
    interval: tuple[float, float]
    counts: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Entry of the legend, such as "M: 0.912 [0.853, 0.961]"."""
        interval = "" if np.isnan(self.interval).any() else " [{:.3f}, {:.3f}]".format(*self.interval)
        return f"{self.name or 'AUROC'}: {self.auroc:.3f}{interval}"


def lines_of(curves: xr.Dataset | Mapping[str, xr.Dataset]) -> list[RocLine]:
    """Return the curves as `roc` draws them."""
    lines = []
    for name, data in by_name(curves, what="ROC curve", source=_SOURCE).items():
        names = ["false_positive_rate", "true_positive_rate", "threshold"]
        columns = columns_of(data, names, what="ROC curve", source=_SOURCE, dim="point")
        rates = np.array([columns[key] for key in names[:2]], dtype=float)
        if not bool(((rates >= 0) & (rates <= 1)).all()):
            raise SchemaError(f"The ROC curve '{name}' has rates outside of 0 to 1; create it with {_SOURCE}.")
        if "auroc" not in data.attrs:
            raise SchemaError(f"The ROC curve '{name}' lacks the attribute auroc; create it with {_SOURCE}.")
        interval = (float(data.attrs.get("low", np.nan)), float(data.attrs.get("high", np.nan)))
        counts = tuple(int(data.attrs[key]) for key in ("n_runs", "n_diverged") if key in data.attrs)
        lines.append(RocLine(name, columns, float(data.attrs["auroc"]), interval, counts))
    return lines


def _note(lines: list[RocLine]) -> list[str]:
    words = ["legend: area under the curve"]
    if not all(np.isnan(line.interval).any() for line in lines):
        words[0] += " [95 % interval]"
    counts = {line.counts for line in lines if len(line.counts) == 2}
    if len(counts) == 1 and all(line.counts for line in lines):
        n_runs, n_diverged = counts.pop()
        words.append(f"{n_runs} runs, {n_diverged} diverged")
    return words
