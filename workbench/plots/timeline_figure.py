"""Timeline of several runs: their signals and events on one axis of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np

from workbench.errors import OptionError
from workbench.formatting import counted, percent_range
from workbench.io.run_access import named_runs
from workbench.option_checks import NonNegativeInt, checked, one_of
from workbench.plots import style
from workbench.plots.dataset_columns import require_choices
from workbench.plots.figure_files import redrawable
from workbench.plots.timeline_drawing import Drawing
from workbench.plots.timeline_events import signal_of
from workbench.plots.timeline_matplotlib import TimelinePicture
from workbench.plots.timeline_panels import RunEvents, SignalPanel
from workbench.plots.traces_figure import Trace, with_unit
from workbench.studies import signals as sig
from workbench.studies.lines import Quantiles, SignalBand, healthy_band

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr


@checked
@redrawable
def timeline(
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset],
    *,
    signals: str | Sequence[str] | None = None,
    reduce: Annotated[str, one_of(sig.REDUCTIONS)] | None = None,
    healthy: xr.DataTree | Mapping[str, xr.DataTree] | int | None = None,
    band: Quantiles = (0.05, 0.95),
    shows_all: bool = False,
    places: Mapping[str, NonNegativeInt] | None = None,
    view: tuple[float, float] | None = None,
    selected: int | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw signals of several runs on one axis of steps, with alarms, faults, actions, divergence and lead times.

    The first panel has one lane per run with its events: active faults, the first alarm of each signal (filled: a
    mechanism; hollow: loss, largest token losses or gradient norm), actions, the divergence, and the lead time from the
    first alarm of a mechanism to the first established signal or the divergence. Measurements of probes are dots if
    they passed and squares if they found a fault. The text above states the first alarm and its likely cause. The next
    panels show the evidence of each run, where available: the signals that reached an alarm first or are nearest to one
    (`workbench.alarms.evidence_of` adds it to older runs). Then there is one panel per signal with one line per run;
    alarms are marked on the line of their signal.

    Args:
        runs: One run, or several by name. They may differ in recorded variables and steps, and need no events.
        signals: A name or names from ``wb.signals.names(run)``, such as ``"effective_rank D2"``. None selects loss and
            gradient norm, the signals with the first alarms, and those that distinguish mechanisms.
        reduce: Reduction over layers, heads and other dimensions: ``"min"``, ``"max"`` or ``"mean"``. None selects the
            worst value: the minimum of ranks and entropies, the maximum of other signals.
        healthy: Healthy runs; the range between two quantiles of their values at each step is shaded. If it is a
            number, the range is that of the values of each run before that step.
        band: The two quantiles.
        shows_all: Whether the axes fit all values, as in `traces`.
        places: Style number (color, marker, dash) of each run, by name; None numbers them in the order given.
        view: First and last step in view; the axes fit the values between them. None selects all steps.
        selected: Step to mark in all panels; None marks none.
        backend: ``"bokeh"`` for the screen (linked zoom and cursor, tooltips) or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only; for matplotlib a single element that draws all panels.
        Lines with more than a few thousand points are drawn as the minimum and maximum of short intervals, so that no
        spike is lost.

    Raises:
        SchemaError: If there is no run, or no run has one of the signals.
        OptionError: If the backend or the reduction does not exist, the band is invalid, or a run has no style number.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> figure = wb.plots.timeline({"a failed run": run}, signals=["loss", "effective_rank D2"])
        >>> len(figure)  # panels
        3

    See Also:
        `workbench.signals.names`: Lists the signals of a run.
        `workbench.plots.traces`: Draws monitors without events.
        `workbench.widgets.Timeline`: Shows a timeline that can be changed.
    """
    trees = named_runs(runs, needs_spectra=False)
    order = style.model_places(trees, places)
    references = healthy_runs(healthy)
    all_events = [RunEvents.of(name, run, place) for place, (name, run) in zip(order, trees.items(), strict=True)]
    chosen = chosen_signals(trees, all_events, signals)
    panels = []
    for name in chosen:
        lines = [
            _line(run, name, run_events, reduce) for run, run_events in zip(trees.values(), all_events, strict=True)
        ]
        bands = _bands(lines, all_events, references, healthy, name, reduce, band)
        panels.append(SignalPanel.of(name, lines, all_events, bands, shows_all=shows_all, span=view))
    span = view or _view(panels, all_events)
    word = _band_in_words(references, healthy, band)
    with style.drawing(backend) as hv:
        if backend == "matplotlib":
            return TimelinePicture(all_events, panels, span, word, selected).element(hv)
        drawing = Drawing(hv, span, all_events, selected)
        drawn = [drawing.lane(word)]
        drawn += [
            drawing.evidence(run_events, run_events.evidence)
            for run_events in all_events
            if run_events.evidence is not None
        ]
        drawn += [drawing.panel(panel, is_last=panel is panels[-1]) for panel in panels]
        return style.laid_out(hv, drawn, backend)


@redrawable
def sentence_alone(sentence: str, *, backend: str = "bokeh") -> Any:
    """Draw a small figure that states why there is nothing to draw yet."""
    with style.drawing(backend) as hv:
        words = hv.Labels({("x", "y"): [(0.0, 0.5)], "text": [sentence]}, ["x", "y"], "text")
        frame = {"xlim": (0, 1), "ylim": (0, 1), "xaxis": None, "yaxis": None, "title": "", "backend": backend}
        if backend == "bokeh":
            text: dict[str, Any] = {"text_color": style.NEUTRAL, "text_align": "left", "text_font_size": "11pt"}
            hooks = [style.dress_bokeh]
            return words.opts(**text, **frame, frame_width=700, frame_height=60, toolbar=None, hooks=hooks)
        text = {"color": style.INK, "horizontalalignment": "left", "size": 11}
        hooks = [_no_frame_matplotlib]
        return words.opts(**text, **frame, fig_inches=(7.0, 0.6), aspect=11.0, hooks=hooks)


def _no_frame_matplotlib(plot: Any, element: Any) -> None:
    """Hide the axes, as a holoviews hook."""
    plot.handles["axis"].set_axis_off()


def chosen_signals(
    runs: Mapping[str, xr.DataTree], all_events: Sequence[RunEvents], signals: Sequence[str] | None
) -> list[str]:
    """Return the requested signals, or a default selection.

    Raises:
        SchemaError: If no run has one of them, or none is requested.
    """
    known = list(dict.fromkeys(name for run in runs.values() for name in sig.names(run)))
    if signals is None:
        onsets = sorted(
            (event for run_events in all_events for event in run_events.onsets), key=lambda event: event.step
        )
        alarmed = [name for event in onsets if (name := signal_of(event, known)) is not None]
        signals = sig.default_names(runs, alarmed) or known[:4]
    signals = [signals] if isinstance(signals, str) else list(dict.fromkeys(signals))
    require_choices("signals", signals, known)
    return signals


def healthy_runs(healthy: xr.DataTree | Mapping[str, xr.DataTree] | int | None) -> dict[str, xr.DataTree]:
    """Return the runs in ``healthy``; none if it is a number of steps or None.

    Raises:
        SchemaError: If it is neither runs nor a number of steps.
        OptionError: If it is a number below 2.
    """
    if healthy is None:
        return {}
    if isinstance(healthy, int | np.integer) and not isinstance(healthy, bool):
        if healthy < 2:
            raise OptionError.of("healthy", healthy, "runs, or a number of steps of at least 2")
        return {}
    return named_runs(cast("Any", healthy), needs_spectra=False)


def _line(run: xr.DataTree, name: str, run_events: RunEvents, reduce: str | None) -> Trace:
    """Return one signal of a run; without values if the run lacks it, which the panel then states."""
    diverged = None if run_events.diverged is None else run_events.diverged.step
    if name not in sig.catalogue(run):
        return Trace(run_events.run, name, name, np.zeros(0, int), np.zeros(0), diverged=diverged)
    found = sig.read(run, name, reduce=reduce)
    title = with_unit(found.long_name, found.unit)
    return Trace(
        run_events.run, title, found.variable, found.step, found.value, found.part == "spectra", diverged=diverged
    )


def _bands(
    lines: list[Trace],
    all_events: Sequence[RunEvents],
    references: Mapping[str, xr.DataTree],
    healthy: Any,
    name: str,
    reduce: str | None,
    quantiles: tuple[float, float],
) -> list[tuple[int | None, SignalBand]]:
    if references:
        found = [sig.read(run, name, reduce=reduce) for run in references.values() if name in sig.catalogue(run)]
        return [(None, healthy_band([(line.step, line.value) for line in found], quantiles=quantiles))]
    if healthy is None:
        return []
    return [
        (run_events.place, own_band(line.step, line.value, int(healthy), quantiles))
        for line, run_events in zip(lines, all_events, strict=True)
    ]


def own_band(step: np.ndarray, value: np.ndarray, before: int, quantiles: tuple[float, float]) -> SignalBand:
    """Return the quantile range of the values of a line before a step, constant over all its steps."""
    start = value[(step < before) & np.isfinite(value)]
    if not len(start):
        return SignalBand(np.zeros(0), np.zeros(0), np.zeros(0))
    lower, upper = np.quantile(start, quantiles)
    return SignalBand(step[[0, -1]].astype(float), np.repeat(lower, 2), np.repeat(upper, 2))


def _band_in_words(references: Mapping[str, Any], healthy: Any, quantiles: tuple[float, float]) -> str:
    quantile_range = f"{percent_range(*quantiles)} range"
    if references:
        return f"gray band: {quantile_range} of {counted(len(references), 'healthy run')}"
    return "" if healthy is None else f"band: {quantile_range} of each run before step {healthy}"


def _view(panels: Sequence[SignalPanel], all_events: Sequence[RunEvents]) -> tuple[float, float]:
    ends = [end for run_events in all_events for end in (run_events.first_step, run_events.last_step)]
    steps = [line.step[[0, -1]] for panel in panels for line in panel.panel.lines if len(line.step)]
    first, last = min(ends), max(ends, default=1)
    if steps:
        first, last = min(first, np.min(steps)), max(last, np.max(steps))
    space = 0.02 * (last - first) or 0.5
    return float(first - space), float(last + space)
