"""How well scores separate diverging runs from others: ROC curves."""

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

_SOURCE = "workbench.risk.scores.roc_curve()"
_SIDE = 380


@redrawable
def roc(
    curves: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    places: Mapping[str, int] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the ROC curve of one score, or of several by name, with the area under each in the legend.

    A point is one threshold: the share of the diverging runs that it catches against the share of the surviving runs
    that it calls dangerous. On the screen the pointer shows the threshold. On the dashed diagonal a score is no
    better than chance; below it, its sign is wrong.

    Args:
        curves: Dataset with dim ``point``: false_positive_rate, true_positive_rate and threshold (above or at which a
            run is called dangerous; infinite: none is); attrs ``auroc`` and, where known, ``low`` and ``high`` of its
            interval, ``n_runs`` and ``n_diverged``. Or several by name.
        places: Style number of each score (`style.model_style`), by name; None: in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If there is no curve, or one lacks a variable or leaves the unit square.
        OptionError: If the backend or a score's place does not exist.

    Example:
        >>> import workbench as wb
        >>> curve = wb.risk.roc_curve([0.1, 0.4, 0.3, 0.9], [False, False, True, True], n_bootstrap=0)
        >>> figure = wb.plots.roc({"my score": curve})
        >>> len(figure)  # panels
        1
    """
    lines = lines_of(curves)
    order = style.model_places([line.name for line in lines], places)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "false-positive rate", "true-positive rate")
        draw.line([0, 1], [0, 1], color=style.NEUTRAL, dash="dashed", width=1)
        for line, place in zip(lines, order, strict=True):
            look, columns = style.model_style(place), line.columns
            x, y = columns["false_positive_rate"], columns["true_positive_rate"]
            draw.line(x, y, color=look["color"], dash=look["dash"], width=2, label=line.label)
            if draw.is_bokeh:  # invisible, for the pointer
                shown = {"threshold": np.array([f"{at:.3g}" for at in columns["threshold"]])}
                tips = [
                    ("", line.name),
                    ("score at least", "@threshold"),
                    ("caught", "$y{0 %}"),
                    ("false alarms", "$x{0 %}"),
                ]
                draw.dots(x, y, color=look["color"], marker=look["marker"], size=9, alpha=0, columns=shown, tips=tips)
        panel = draw.panel(
            title="Diverging runs caught against false alarms",
            note=_note(lines),
            view=((-0.02, 1.02), (-0.02, 1.02)),
            size=(_SIDE, _SIDE),
            names=("surviving runs called dangerous", "diverging runs caught"),
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
        interval: Its lower and upper bound; NaN where none is known.
        counts: Number of runs, and of those that diverged; empty if not known.
    """

    name: str
    columns: dict[str, np.ndarray]
    auroc: float
    interval: tuple[float, float]
    counts: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The entry in the legend, such as "M: 0.912 [0.853, 0.961]"."""
        interval = "" if np.isnan(self.interval).any() else " [{:.3f}, {:.3f}]".format(*self.interval)
        return f"{self.name or 'AUROC'}: {self.auroc:.3f}{interval}"


def lines_of(curves: xr.Dataset | Mapping[str, xr.Dataset]) -> list[RocLine]:
    """The curves as `roc` draws them.

    Raises:
        SchemaError: If there is none, or one lacks a variable or leaves the unit square.
    """
    lines = []
    for name, data in by_name(curves, what="ROC curve", source=_SOURCE).items():
        names = ["false_positive_rate", "true_positive_rate", "threshold"]
        columns = columns_of(data, names, what="ROC curve", source=_SOURCE, dim="point")
        rates = np.array([columns[key] for key in names[:2]], dtype=float)
        if not ((rates >= 0) & (rates <= 1)).all():
            raise SchemaError(f"The ROC curve '{name}' has rates outside 0 to 1; make it with {_SOURCE}.")
        if "auroc" not in data.attrs:
            raise SchemaError(f"The ROC curve '{name}' lacks the attribute auroc; make it with {_SOURCE}.")
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
