"""Effect of each control or dose: divergence rate and accuracy, one row per control, with published values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import capitalized
from workbench.plots import style
from workbench.plots.dataset_columns import require_choices
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives
from workbench.studies import published
from workbench.studies.outcomes import RATES, divergence_rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

MEASURES = ("divergence_rate", "accuracy", "near_unit_mass")
#: Width of a panel in pixels.
_WIDTH = 340
OURS, PUBLISHED = style.MODEL_COLORS[0], style.MODEL_COLORS[1]


@redrawable
def dose_response(
    outcomes: xr.Dataset,
    *,
    measures: str | Sequence[str] = ("divergence_rate", "accuracy"),
    backend: str = "bokeh",
) -> Any:
    """Draw the outcomes of each control: one row per control, one panel per measure, as in the paper's Fig. 2.

    A dot with a line is the fraction of runs that diverged with its Wilson interval. For the other measures, the dot is
    the mean over the runs that converged, and the small dots are these runs. A hollow diamond is the value of
    `workbench.published.shaping_table`. The vertical line is the value of the control "none". Rows are comparable only
    where the same learning rates and seeds were run; see `workbench.outcomes.shared_cells`.

    Args:
        outcomes: Table with one entry per run, such as `workbench.samples.shaping`; it determines the order of the
            controls.
        measures: Any of ``"divergence_rate"``, ``"accuracy"`` or ``"near_unit_mass"``.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only.

    Raises:
        SchemaError: If the dataset is not a table of outcomes, is empty, or holds a run twice, or if a measure does not
            exist.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> figure = wb.plots.dose_response(wb.samples.shaping("controls"), measures=["divergence_rate"])
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.outcomes.divergence_rates`: Computes the values.
        `workbench.plots.explosion_edge`: Draws them over the learning rate.
    """
    measures = [measures] if isinstance(measures, str) else list(measures)
    require_choices("measures", measures, MEASURES)
    panels = [Responses.of(outcomes, measure) for measure in measures]
    with style.drawing(backend) as hv:
        drawn = [_panel(hv, backend, values, index) for index, values in enumerate(panels)]
        return style.laid_out(hv, drawn, backend, n_columns=len(drawn))


@dataclass(frozen=True)
class Responses:
    """Values of one measure for all controls.

    Attributes:
        measure: Name of the measure.
        controls: Names of the controls, from top to bottom.
        values: Our values, shape (control,); NaN without a usable run.
        intervals: Lower and upper bounds, shape (2, control); NaN for means.
        n_runs: Number of runs of each value, shape (control,).
        runs: Columns ``row`` and ``value`` of the individual runs of a mean; empty for the divergence rate.
        published: Published values, shape (control,); NaN where there is none.
        reference: Value of the control "none"; NaN if there is none.
    """

    measure: str
    controls: tuple[str, ...]
    values: np.ndarray
    intervals: np.ndarray
    n_runs: np.ndarray
    runs: dict[str, np.ndarray]
    published: np.ndarray
    reference: float

    @classmethod
    def of(cls, outcomes: xr.Dataset, measure: str) -> Responses:
        """Compute one measure from a table of outcomes; see `dose_response`."""
        rates = divergence_rates(outcomes)
        controls = tuple(map(str, rates["control"].values))
        if measure == "divergence_rate":
            n_runs, intervals = rates["n_runs"].values, np.array([rates["low"].values, rates["high"].values])
            runs = {"row": np.zeros(0), "value": np.zeros(0)}
        else:
            single = outcomes[measure].values.astype(float)
            has_value = ~outcomes["has_diverged"].values.astype(bool) & ~np.isnan(single)
            row = np.array([controls.index(name) for name in outcomes["control"].values])
            n_runs, intervals = (
                np.bincount(row[has_value], minlength=len(controls)),
                np.full((2, len(controls)), np.nan),
            )
            runs = {"row": row[has_value].astype(float), "value": single[has_value]}
        theirs = published.shaping_table()[measure].reindex(control=list(controls)).values.astype(float)
        values = rates[measure].values.astype(float)
        line = float(values[controls.index("none")]) if "none" in controls else np.nan
        return cls(measure, controls, values, intervals, n_runs, runs, theirs, line)

    @property
    def title(self) -> str:
        """Label of the axis: the measure and the runs that it covers."""
        return RATES[self.measure][0] + ("" if self.measure == "divergence_rate" else ", converged runs")

    @property
    def silent(self) -> list[int]:
        """Rows without any run."""
        return np.flatnonzero(np.isnan(self.values)).tolist()

    @property
    def note(self) -> list[str]:
        """Explanation of the markers."""
        few, many = self.n_runs.min(), self.n_runs.max()
        n_runs = f"{few}" if few == many else f"{few} to {many}"
        words = [f"● ours, {n_runs} runs" + (", 95 % interval" if self.measure == "divergence_rate" else "")]
        if not np.isnan(self.published).all():
            words.append("◇ published")
        if not np.isnan(self.reference):
            words.append("│ none")
        return words

    @property
    def view(self) -> tuple[float, float]:
        """Range of the axis: [0, 1] for the divergence rate, otherwise from 0 to the largest value, with a margin."""
        drawn = np.concatenate([self.values, self.runs["value"], self.published])
        highest = 1.0 if self.measure == "divergence_rate" else np.nanmax(drawn, initial=0.1)
        return -0.03 * highest, 1.05 * highest


def _panel(hv: Any, backend: str, values: Responses, index: int) -> Any:
    """Draw one measure; rows are numbered from 0 at the top."""
    draw = Primitives(hv, backend, values.title, "control")
    n_rows = len(values.controls)
    place, names = -np.arange(n_rows, dtype=float), np.array(values.controls)
    has_ours, has_published = ~np.isnan(values.values), ~np.isnan(values.published)
    view = (values.view, (0.6 - n_rows, 0.6))
    if not np.isnan(values.reference):
        draw.line([values.reference] * 2, view[1], color=style.NEUTRAL, width=1)
    if len(values.runs["value"]):
        draw.dots(values.runs["value"], -values.runs["row"], color=OURS, alpha=0.35, size=4)
    low, high = values.intervals
    draw.bars(low, place, high, place, color=OURS, width=2)
    columns = {"low": low, "high": high, "n_runs": values.n_runs, "name": names}
    tips = [("", "@name"), (values.title, "$x{0.0 %}"), ("runs", "@n_runs")]
    if values.measure == "divergence_rate":
        tips.insert(2, ("95 % interval", "@low{0 %} to @high{0 %}"))
    ours = {name: column[has_ours] for name, column in columns.items()}
    draw.dots(values.values[has_ours], place[has_ours], color=OURS, size=9, columns=ours, tips=tips)
    if has_published.any():
        draw.dots(
            values.published[has_published],
            place[has_published],
            color=PUBLISHED,
            marker="diamond",
            size=10,
            is_hollow=True,
            columns={"name": names[has_published]},
            tips=[("", "@name"), ("published", "$x{0.0 %}")],
        )
    for row in values.silent:
        draw.words(0.0, -row, "all runs diverged" if values.measure == "accuracy" else "no value")
    return draw.panel(
        title=capitalized(values.title),
        note=values.note,
        view=view,
        size=(_WIDTH, 26 * n_rows + 20),
        names=("", ""),
        ticks=(None, [(-row, "" if index else name) for row, name in enumerate(values.controls)]),
        formats=("percent", "plain"),
        at=(index * (_WIDTH + 25), 0),
    )
