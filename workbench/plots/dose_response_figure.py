"""Effect of each control or dose: divergence rate and accuracy, one row per control, with published values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import capitalized
from workbench.plots import style
from workbench.plots.dataset_columns import require_choices, require_variables
from workbench.plots.figure_files import redrawable
from workbench.studies import published as papers
from workbench.studies.outcomes import RATES, divergence_rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

MEASURES = ("divergence_rate", "accuracy", "near_unit_mass")
OURS, PUBLISHED = style.MODEL_COLORS[0], style.MODEL_COLORS[1]


@redrawable
def dose_response(
    outcomes: xr.Dataset,
    *,
    measures: str | Sequence[str] = ("divergence_rate", "accuracy"),
    reference: str | None = "none",
    published: xr.Dataset | bool = True,
    backend: str = "bokeh",
) -> Any:
    """Draw the outcomes of each control: one row per control, one panel per measure, as in the paper's Fig. 2.

    A dot with a line is the fraction of runs that diverged with its Wilson interval. For the other measures, the dot is
    the mean over the runs that converged, and the small dots are these runs. A hollow diamond is the published value.
    The vertical line is the value of the reference. Rows are comparable only where the same learning rates and seeds
    were run; see `workbench.outcomes.shared_cells`.

    Args:
        outcomes: Table with one entry per run, such as `workbench.samples.shaping`; it determines the order of the
            controls.
        measures: Any of ``"divergence_rate"``, ``"accuracy"`` or ``"near_unit_mass"``.
        reference: Control whose value is drawn as a line through all rows, if it has runs; None draws no line.
        published: Published values by control. True selects `workbench.published.shaping_table`, False draws none.
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
    figures = (papers.shaping_table() if published else None) if isinstance(published, bool) else published
    panels = [Responses.of(outcomes, measure, reference=reference, published=figures) for measure in measures]
    with style.drawing(backend) as hv:
        draw = _draw_bokeh if backend == "bokeh" else _draw_matplotlib
        drawn = [draw(hv, panel, is_first=index == 0) for index, panel in enumerate(panels)]
        return style.laid_out(hv, drawn, backend, n_columns=len(drawn), tight=True, hspace=0.08, fig_size=125)


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
        reference: Value of the reference control; NaN if there is none.
        reference_name: Name of the reference control.
    """

    measure: str
    controls: tuple[str, ...]
    values: np.ndarray
    intervals: np.ndarray
    n_runs: np.ndarray
    runs: dict[str, np.ndarray]
    published: np.ndarray
    reference: float
    reference_name: str

    @classmethod
    def of(
        cls, outcomes: xr.Dataset, measure: str, *, reference: str | None = None, published: xr.Dataset | None = None
    ) -> Responses:
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
        theirs = [np.nan] * len(controls)
        if published is not None:
            require_variables(published, ("control", measure), what="table", source="wb.published.shaping_table()")
            known = published["control"].values.tolist()
            theirs = [float(published[measure].sel(control=name)) if name in known else np.nan for name in controls]
        values = rates[measure].values.astype(float)
        line = values[controls.index(reference)] if reference in controls else np.nan
        return cls(
            measure, controls, values, intervals, n_runs, runs, np.array(theirs), float(line), str(reference or "")
        )

    @property
    def title(self) -> str:
        """Label of the axis: the measure and the runs that it covers."""
        return RATES[self.measure][0] + ("" if self.measure == "divergence_rate" else ", converged runs")

    @property
    def silent(self) -> list[int]:
        """Rows without any run."""
        return np.flatnonzero(np.isnan(self.values)).tolist()

    @property
    def note(self) -> str:
        """Explanation of the markers."""
        few, many = self.n_runs.min(), self.n_runs.max()
        n_runs = f"{few}" if few == many else f"{few} to {many}"
        words = [f"● ours, {n_runs} runs" + (", 95 % interval" if self.measure == "divergence_rate" else "")]
        if not np.isnan(self.published).all():
            words.append("◇ published")
        if not np.isnan(self.reference):
            words.append(f"│ {self.reference_name}")
        return "   ".join(words)

    @property
    def view(self) -> tuple[float, float]:
        """Range of the axis: [0, 1] for the divergence rate, otherwise from 0 to the largest value, with a margin."""
        drawn = np.concatenate([self.values, self.runs["value"], self.published])
        highest = 1.0 if self.measure == "divergence_rate" else np.nanmax(drawn, initial=0.1)
        return -0.03 * highest, 1.05 * highest


def _elements(hv: Any, panel: Responses) -> dict[str, Any]:
    """Return the elements of a panel by name; rows are numbered from 0 at the top."""
    x, y = hv.Dimension("value", label=panel.title), hv.Dimension("place", label="control")
    place = -np.arange(len(panel.controls), dtype=float)
    has_ours, has_published = ~np.isnan(panel.values), ~np.isnan(panel.published)
    low, high = panel.intervals
    ours = {
        "value": panel.values,
        "place": place,
        "low": low,
        "high": high,
        "n_runs": panel.n_runs,
        "control": np.array(panel.controls),
    }
    parts = {}
    if not np.isnan(panel.reference):
        parts["reference"] = hv.VLine(panel.reference)
    if len(panel.runs["value"]):
        parts["runs"] = hv.Points({"value": panel.runs["value"], "place": -panel.runs["row"]}, [x, y])
    has_interval = ~np.isnan(low)
    if has_interval.any():
        ends = (low[has_interval], place[has_interval], high[has_interval], place[has_interval])
        parts["intervals"] = hv.Segments(ends, [x, y, "value_", "place_"])
    parts["ours"] = hv.Points({k: v[has_ours] for k, v in ours.items()}, [x, y], ["low", "high", "n_runs", "control"])
    theirs = {"value": panel.published, "place": place, "control": np.array(panel.controls)}
    if has_published.any():
        parts["published"] = hv.Points({k: v[has_published] for k, v in theirs.items()}, [x, y], ["control"])
    for i in panel.silent:
        word = "all runs diverged" if panel.measure == "accuracy" else "no value"
        parts[f"silent {i}"] = hv.Text(0.0, float(place[i]), word, halign="left", fontsize=style.TICK_SIZE - 1)
    return parts


def _view(panel: Responses, *, is_first: bool) -> dict[str, Any]:
    return {
        "xlim": panel.view,
        "ylim": (0.6 - len(panel.controls), 0.6),
        "yticks": [(-i, name if is_first else "") for i, name in enumerate(panel.controls)],
        "xlabel": "",
        "ylabel": "",
        "show_legend": False,
    }


def _draw_bokeh(hv: Any, panel: Responses, *, is_first: bool) -> Any:
    tips = [("", "@control"), (panel.title, "@value{0.0 %}"), ("runs", "@n_runs")]
    if panel.measure == "divergence_rate":
        tips.insert(2, ("95 % interval", "@low{0 %} to @high{0 %}"))
    styles: dict[str, dict[str, Any]] = {
        "reference": {"color": style.NEUTRAL, "line_width": 1},
        "runs": {"color": OURS, "alpha": 0.35, "size": 4},
        "intervals": {"color": OURS, "line_width": 2},
        "ours": {"color": OURS, "size": 9, "tools": ["hover"], "hover_tooltips": tips},
        "published": {
            "line_color": PUBLISHED,
            "fill_alpha": 0,
            "marker": "diamond",
            "size": 13,
            "line_width": 1.8,
            "tools": ["hover"],
            "hover_tooltips": [("", "@control"), ("published", "@value{0.0 %}")],
        },
        "silent": {"text_color": style.NEUTRAL, "text_font_size": "9pt"},
    }
    parts = [part.opts(**styles[name.split()[0]], backend="bokeh") for name, part in _elements(hv, panel).items()]
    return hv.Overlay(parts).opts(
        **_view(panel, is_first=is_first),
        title=capitalized(panel.title),
        frame_width=340,
        frame_height=26 * len(panel.controls) + 20,
        show_grid=True,
        default_tools=[],
        tools=["pan", "xwheel_zoom", "box_zoom", "reset", "save"],
        active_tools=[],
        hooks=[style.dress_bokeh, style.bare_bokeh((True, is_first)), _percent_bokeh, style.note_bokeh(panel.note)],
        backend="bokeh",
    )


def _draw_matplotlib(hv: Any, panel: Responses, *, is_first: bool) -> Any:
    styles: dict[str, dict[str, Any]] = {
        "reference": {"color": style.NEUTRAL, "linewidth": 0.8},
        "runs": {"color": OURS, "alpha": 0.35, "s": 6, "edgecolors": "none"},
        "intervals": {"color": OURS, "linewidth": 1.4},
        "ours": {"color": OURS, "s": 34, "edgecolors": "none"},
        "published": {"color": "none", "marker": "D", "s": 34, "edgecolors": PUBLISHED, "linewidth": 1.3},
        "silent": {"color": style.NEUTRAL},
    }
    parts = [part.opts(**styles[name.split()[0]], backend="matplotlib") for name, part in _elements(hv, panel).items()]
    ratio = 5.0 / (0.23 * len(panel.controls) + 0.3)
    return hv.Overlay(parts).opts(
        **_view(panel, is_first=is_first),
        title="",
        aspect=ratio,
        hooks=[
            style.dress_matplotlib,
            _percent_matplotlib(ratio),
            style.title_matplotlib(capitalized(panel.title), note=panel.note),
        ],
        backend="matplotlib",
    )


def _percent_bokeh(plot: Any, element: Any) -> None:
    from bokeh.models import NumeralTickFormatter

    for axis in plot.state.xaxis:
        axis.formatter = NumeralTickFormatter(format="0 %")


def _percent_matplotlib(ratio: float) -> Any:
    """Return a holoviews hook: percent on the x axis, and a frame with width / height = ``ratio``."""

    def hook(plot: Any, element: Any) -> None:
        from matplotlib.ticker import PercentFormatter

        axis = plot.handles["axis"]
        axis.set_aspect("auto")
        axis.set_box_aspect(1 / ratio)
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    return hook
